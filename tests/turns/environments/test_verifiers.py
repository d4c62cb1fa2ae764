"""Environments of the package verifiers, where it is installed; turns are written down in place of a model."""

import signal

import pytest
from foreign_runs import train
from paths import SUPPORT

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.turns.environments.instances import EnvironmentEntry, load_environment
from hybrid_grpo.workers.calls import Call
from hybrid_grpo.workers.snapshots import Snapshot, restored

vf = pytest.importorskip("verifiers")
if not hasattr(vf, "load_environment"):
    pytest.skip("this version of verifiers has no load_environment", allow_module_level=True)

FILE = SUPPORT / "verifiers_environments.py"


def process(name):
    return load_environment(EnvironmentEntry(f"{FILE}:{name}"), "rollout.environment")


def order(environment, do, **arguments):
    """What came of an order, or why it failed."""
    reply = environment.reply(Call({"request": [{"do": do, **arguments}]}, [0]))
    return reply.failures[0] or reply.values[0]


def play(environment, turns, *, most=9):
    """What the environment says to turns but the last; of the last turn, the outcome or failure."""
    columns = {"prompt": [{"role": "user", "content": "Begin."}], "answer": "12", "info": {"start": 3}}
    begun = order(environment, "begin", columns=columns, seed=1, observation=None, pictures=[], is_first=False)
    assert begun == {"said": None}
    said = [order(environment, "step", text=text, is_last=n == most) for n, text in enumerate(turns, 1)]
    return [step["said"]["text"] for step in said[:-1]], said[-1]


@pytest.mark.parametrize(
    ("name", "turns", "most", "said", "done", "reward"),
    [
        ("load_environment", ["6", "7", "12"], 9, ["It is 6.", "It is 6."], True, 12 / 12 + 0.06),
        ("load_environment", ["6", "7"], 2, ["It is 6."], False, 6 / 12 + 0.03),  # cut by rollout.max_turns
        ("single", ["12"], 9, [], True, 1.0),
        ("single", ["13"], 9, [], True, 0.0),
    ],
)
def test_its_own_loop_answers_ends_and_scores(name, turns, most, said, done, reward):
    environment = process(name)
    for _ in range(2):  # one environment for the completions of a process, one after the other
        heard, last = play(environment, turns, most=most)
        assert heard == said and last["done"] is done
        assert last["end"]["reward"] == pytest.approx(reward)
    if name == "load_environment":
        # Reward functions are given what the rubric found, and nothing of the environment, which has a whole data set.
        [(attribute, metrics)] = vars(restored(Snapshot(last["end"]["state"]))).items()
        assert (attribute, metrics["share"], metrics["words"]) == ("metrics", *((1.0, 6) if done else (0.5, 3)))


def test_a_cut_turn_is_scored_without_it():
    environment = process("load_environment")
    play(environment, ["6"])
    assert order(environment, "end")["reward"] == pytest.approx(6 / 12 + 0.01)


@pytest.mark.parametrize(("turn", "told"), [("forget", "rewrote the conversation"), ("break", "broken")])
def test_what_cannot_be_trained_with_fails_the_completion(turn, told):
    environment = process("load_environment")
    _, failure = play(environment, [turn])
    assert told in failure.message
    play(environment, ["6"])  # the process goes on


def test_tools_are_refused_and_signals_are_left_alone():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(UserError, match=r"give its tools as rollout\.tools"):
        process("with_tools")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_an_installed_one_is_loaded_by_its_name(monkeypatch):
    monkeypatch.syspath_prepend(str(SUPPORT))
    environment = load_environment(EnvironmentEntry("verifiers:verifiers-environments"), "rollout.environment")
    assert play(environment, ["6"])[1]["said"]["text"] == "It is 6."


@pytest.mark.ranks
def test_a_run_trains_with_its_rubric(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SUPPORT))
    rows = tmp_path / "rows.jsonl"
    vf.load_environment("verifiers-environments").get_dataset().to_json(rows)
    rows.write_text(rows.read_text() * 4)
    lines = train(tmp_path, f"{FILE}:load_environment", "--data.path", rows, "--log.rollouts_every", "1")
    # The number is doubled by no one: a share of 3 / 12, and a hundredth for each message before a turn that was cut.
    earned = {round(100 * line["reward"]) for line in lines}
    assert earned <= {25, 26, 28, 30} and len(earned) > 1
