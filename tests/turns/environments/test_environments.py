"""Environments of both kinds, with turns that are written down here in place of a model. Most run in this process, and
those that go wrong in theirs."""

import functools
import json
import re
from dataclasses import asdict, replace

import pytest
from inline_pool import InlinePool
from partner_answers import answer, answers, tokens
from paths import SUPPORT
from tool_tokenizers import tool_tokenizer

from hybrid_grpo.config import TrainConfig, build
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Completion, Prompt, Rollout
from hybrid_grpo.data.episodes import Episode
from hybrid_grpo.generation import Request
from hybrid_grpo.generation.journal import Journal
from hybrid_grpo.rewards.loader import load_rewards
from hybrid_grpo.rewards.scorer import Rewards
from hybrid_grpo.turns.environments import environments
from hybrid_grpo.turns.environments.environments import rewards_of
from hybrid_grpo.turns.environments.in_worker import EnvironmentEntry
from hybrid_grpo.turns.partners import partners_of

FILE = SUPPORT / "environments.py"
NAMES = ["Counter", "Echo", "Wordle", "Owner", "Steps", "Gymnasium", "Bad"]
PROMPT = [{"role": "user", "content": "Go."}]


def settings(environment, **rollout):
    rollout = {"max_turns": 4, "max_tool_tokens": 200, "tool_timeout_s": 60, **rollout, "environment": environment}
    return build(TrainConfig, {"rollout": rollout, "policy": {"model": "none"}, "run": {"seed": 3}})


@pytest.fixture(scope="module")
def tokenizer():
    return tool_tokenizer("hermes")


@pytest.fixture(scope="module")
def partners(tokenizer):
    config = settings({name.lower(): f"{FILE}:{name}" for name in NAMES})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environments, "Pool", InlinePool)
        partners = partners_of(config, tokenizer, (tokenizer.eos_token_id,))
    yield partners
    partners.begin([])
    assert not partners.environments._pool.held, "every environment was released"


def prompt_of(tokenizer, number=0, **columns):
    return Prompt(number, PROMPT, tokens(tokenizer, "Go."), columns)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(partners, tokenizer, prompt, turns, *, key=1, cut=False):
    """The completion that these turns make, which is cut within the last where `cut` is set."""
    partners.begin([Request(prompt.token_ids, [key], max_total_tokens=9999, prompt=prompt)])
    sampled, given, finish = [], [], None
    for number, text in enumerate(turns, 1):
        ids = [*tokens(tokenizer, text), tokenizer.eos_token_id]
        sampled += ids
        last = cut and number == len(turns)
        finish = partners.cut(key) if last else partners.ended(key, ids, room=1000)
        assert finish is None, "the environment ends first"
        finish = answer(partners, key)
        if isinstance(finish, str):
            break
        given.append((len(sampled), finish))
    assert number == len(turns), "it ends with the last turn"
    return partners.finished(key, Completion(sampled, [0.0] * len(sampled), finish, text, tuple(given)))


def said(completion):
    return [message["content"] for message in completion.messages if message["role"] != "assistant"]


@functools.cache
def functions():
    entries = [{"function": f"{FILE}:{name}", "isolation": "none"} for name in ("counted", "reward_func", "locks")]
    return {reward.name: reward for reward in load_rewards(build(TrainConfig, {"rewards": entries}).rewards)}


def scores(completions, function=None, by_turn=True):
    own = [] if function is None else [functions()[function]]
    rewards = Rewards(own, environments=rewards_of(NAMES, by_turn=by_turn))
    prompts = [Prompt(0, PROMPT, [1], {})] * len(completions)
    return rewards.score(prompts, completions, len(completions))


WORDLE = ["XGX", "GGG", "error: ValueError: Game over."]
CASES = [
    # TRL's documentation: a counter whose method is a tool, and a function that looks at it.
    ("counter", {}, [call("increment", step=2), call("increment", step=3), "done"], ["2", "5"], "stop", "counted", 5.0),
    # A reward in an attribute, async methods, and an observation at the end of the prompt.
    ("echo", {}, [call("echo", message="hey"), "hey"], ["hey"], "stop", "reward_func", 3.0),
    # A game that is over, and is played on: the model is told.
    ("wordle", {}, [*(call("guess", word=w) for w in ("aaa", "cab", "x")), "."], WORDLE, "stop", "reward_func", 1.0),
    # `get_reward`, and a tool of the name `step`; two calls in a turn are carried out in their order.
    ("owner", {"goal": 3}, [call("step", by=1) + call("step", by=2), "there"], ["at 1", "at 3"], "stop", None, 1.0),
    ("owner", {"goal": 3}, ["I do nothing"], [], "stop", None, 0.0),
    # Every turn a step.
    ("steps", {}, ["one", "bye"], ["1!"], "stop", None, 6.0),
    ("steps", {}, ["a", "b", "c", "d"], ["1!", "2!", "3!"], "length", None, 4.0),
    ("gymnasium", {}, ["go", "stop"], ['{"said": "go"}'], "stop", None, 2.0),
]


@pytest.mark.parametrize(("name", "columns", "turns", "read", "finish", "function", "reward"), CASES)
def test_environments_answer_turns_and_give_rewards(
    partners, tokenizer, name, columns, turns, read, finish, function, reward
):
    [prompt] = partners.opened([prompt_of(tokenizer, environment=name, **columns)], 7)
    completion = play(partners, tokenizer, prompt, turns)
    assert (said(completion), completion.finish) == (read, finish)
    found = scores([completion], function)
    assert found.reward_B.tolist() == [reward]
    assert found.failures == {}
    assert scores([completion], function, by_turn=False).reward_B.tolist() == [reward]


def test_rewards_of_turns_are_rewards_of_steps_at_their_ends(partners, tokenizer):
    [prompt] = partners.opened([prompt_of(tokenizer, environment="steps")], 7)
    completions = [play(partners, tokenizer, prompt, turns) for turns in (["one", "bye"], ["bye"])]
    assert scores(completions).steps == [[(4, 3.0), (8, 3.0)], [(4, 3.0)]]
    # A turn that is cut was no step, and the rewards before it remain.
    completion = play(partners, tokenizer, prompt, ["one", "tw"], cut=True)
    assert (completion.finish, completion.episode.steps) == ("length", ((4, 3.0),))
    assert [message["content"] for message in completion.messages] == ["one", "1!", "tw"]


def test_the_beginning_is_the_groups_and_depends_on_seed_step_and_prompt(partners, tokenizer):
    rows = [prompt_of(tokenizer, number, environment="gymnasium") for number in range(6)]
    first, again, other = (partners.opened(rows, step) for step in (7, 7, 8))
    later = partners.opened([replace(row, epoch=1) for row in rows], 7)
    texts = [prompt.text[-1]["content"] for prompt in first]
    assert texts == [prompt.text[-1]["content"] for prompt in again]
    assert len(set(texts)) > 2, "prompts begin differently"
    assert all(re.fullmatch(r"Go\. <\d\d>", text) for text in texts)
    assert texts != [prompt.text[-1]["content"] for prompt in later], "and a prompt in another epoch"
    assert texts != [prompt.text[-1]["content"] for prompt in other], "and so do steps"
    for prompt in first:
        written = tokenizer.apply_chat_template(prompt.text, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(prompt.token_ids) == written
        for key in (1, 2):
            assert play(partners, tokenizer, prompt, ["stop"], key=key).episode.failure is None
    # Of several environments, a prompt is told the tools of its own.
    [prompt] = partners.opened([prompt_of(tokenizer, environment="owner", goal=1)], 7)
    written = tokenizer.decode(prompt.token_ids)
    assert '"step"' in written and '"increment"' not in written
    assert (
        "error: there is no tool increment"
        in said(play(partners, tokenizer, prompt, [call("increment", step=1), "."]))[0]
    )


def test_what_a_rollout_leaves_behind_is_released_and_begins_anew(partners, tokenizer):
    pool, [prompt] = partners.environments._pool, partners.opened([prompt_of(tokenizer, environment="steps")], 7)
    assert said(play(partners, tokenizer, prompt, ["one", "bye"])) == ["1!"] and not pool.held
    request = Request(prompt.token_ids, [1], max_total_tokens=9999, prompt=prompt)
    partners.begin([request])
    ids = [*tokenizer("one", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert partners.ended(1, ids, room=1000) is None and answer(partners, 1) != "stop" and len(pool.held) == 1
    partners.begin([request])
    assert not pool.held
    assert said(play(partners, tokenizer, prompt, ["one", "bye"])) == ["1!"]


BAD = [
    ({"how": "reset"}, "fine", "raised ValueError: no reset"),
    ({"how": "differs"}, "fine", "when it was reset for the prompt"),
    ({}, "raise", "raised KeyError: 'oh'"),
    ({}, "nan", "returned the reward nan from step"),
    ({}, "what", "returned 'no step' from step"),
]


@pytest.mark.parametrize(("columns", "turn", "why"), BAD)
def test_an_environment_that_fails_ends_its_completion_without_a_reward(partners, tokenizer, columns, turn, why):
    [prompt] = partners.opened([prompt_of(tokenizer, environment="bad", **columns)], 7)
    completion = play(partners, tokenizer, prompt, [turn])
    assert completion.finish == "stop"
    assert why in completion.episode.failure
    # Counted also where it comes from a journal, so that this process has seen nothing of it.
    partners.begin([])
    numbers = partners.numbers(Rollout([prompt], [completion], 1))
    assert numbers["environment/failed_frac"] == (1.0, 1) and numbers["environment/seconds"][1] == 0
    assert numbers["environment/resets"] == (int(prompt.opening.failure is None), 1)
    # A function that looks at environments is not called, and not blamed.
    found = scores([completion], "counted")
    assert found.reward_B.isnan().all()
    assert why in found.failures.pop("Bad")[0]
    assert not found.failures
    # The next completion has nothing of it.
    [prompt] = partners.opened([prompt_of(tokenizer, environment="bad")], 7)
    assert play(partners, tokenizer, prompt, ["fine"], cut=True).episode.failure is None


def opened_alone(tokenizer, name, rows, **rollout):
    config = settings(f"{FILE}:{name}", **rollout)
    partners = partners_of(config, tokenizer, (tokenizer.eos_token_id,))
    return partners, partners.opened(rows, 7)


@pytest.mark.process
def test_processes_have_a_bound_that_changes_nothing_of_what_environments_say_and_draw(tokenizer):
    """A process was started for each prompt at once, and kept: 1,200 prompts, 1,201 processes."""
    rows = [prompt_of(tokenizer, number) for number in range(40)]
    many, first = opened_alone(tokenizer, "Draws", rows, environment_processes=40)
    partners, opened = opened_alone(tokenizer, "Draws", rows, environment_processes=2)
    assert [prompt.text for prompt in opened] == [prompt.text for prompt in first]
    assert opened[0].text != opened[1].text

    # Three completions under way at once, of which two processes hold two: the third waits until one ends.
    keys = range(3)

    def turn(partners, of, text):
        for key in of:
            ids = [*tokens(tokenizer, text), tokenizer.eos_token_id]
            assert partners.ended(key, ids, room=1000) is None

    draws = []
    for which, prompts in ((partners, opened), (many, first)):
        which.begin(
            [Request(prompts[key].token_ids, [key], max_total_tokens=9999, prompt=prompts[key]) for key in keys]
        )
        turn(which, keys, "go")
        waits = which is partners
        answered = answers(which, 2 if waits else 3)
        assert sorted(answered) == list(keys)[: 2 if waits else 3]
        said = {key: tokenizer.decode(ids) for key, ids in answered.items()}
        turn(which, [0], "bye")
        assert answer(which, 0) == "stop"
        which.finished(0, Completion([1], [0.0], "stop", "bye"))
        if waits:
            said |= {key: tokenizer.decode(ids) for key, ids in answers(which).items()}
        turn(which, keys[1:], "go")
        again = {key: tokenizer.decode(ids) for key, ids in answers(which, 2).items()}
        processes = {re.search(r"(\d+) 0\.", text)[1] for text in (*said.values(), *again.values())}
        assert len(processes) == (2 if waits else 3)
        draws.append([re.search(r"0\.\d+", of[key])[0] for of in (said, again) for key in sorted(of)])
    assert draws[0] == draws[1] and len(set(draws[0])) == 5


@pytest.mark.process
def test_an_opening_that_fails_is_counted_and_its_reason_is_printed(tokenizer, capfd):
    """Prompts whose environment could not be reset had no observation, and nobody was told."""
    rows = [prompt_of(tokenizer, number, how="reset" if number == 1 else "") for number in range(4)]
    partners, opened = opened_alone(tokenizer, "Draws", rows)
    assert "1 of 4 prompts could not be opened; for row 1 (from 0) Draws raised ValueError: no reset" in (
        capfd.readouterr().err
    )
    assert [prompt.opening.failure is None for prompt in opened] == [True, False, True, True]
    completion = play(partners, tokenizer, opened[1], ["fine"])
    assert "raised ValueError: no reset" in completion.episode.failure
    numbers = partners.numbers(Rollout(opened, [completion] * 4, 1))
    assert numbers["environment/openings_failed_frac"] == (0.25, 4) and numbers["environment/resets"] == (3, 1)


@pytest.mark.process
def test_a_method_that_raises_is_an_answer_and_a_process_that_ends_takes_the_environment_with_it(tokenizer):
    """A new process of its seat would pay for an episode that never was."""
    partners, [prompt] = opened_alone(tokenizer, "Leaves", [prompt_of(tokenizer)])
    completion = play(partners, tokenizer, prompt, [call("do", how="raise"), "so"])
    assert "error: ValueError: no luck" in said(completion)[0]
    assert (completion.episode.failure, completion.episode.total) == (None, 1.0)
    episode = play(partners, tokenizer, prompt, [call("do", how="exit")]).episode
    assert (episode.failure, episode.total) == ("ended its process (exit status 5)", None)


@pytest.mark.process
@pytest.mark.parametrize("how", ["hang", "exit", "raise"])
def test_closing_costs_no_reward(tokenizer, how):
    """A `close` that hung or ended the process did so before the reward was sent."""
    partners, [prompt] = opened_alone(tokenizer, "Closes", [prompt_of(tokenizer, how=how)], tool_timeout_s=2.0)
    for _ in range(2):
        episode = play(partners, tokenizer, prompt, ["one"]).episode
        assert (episode.failure, episode.steps[0][1]) == (None, 2.0)


def test_processes_must_fit_the_limit_of_open_files(tokenizer):
    with pytest.raises(UserError, match=r"environment_processes 99999999: .* set it to \d+ or lower"):
        opened_alone(tokenizer, "Draws", [], environment_processes=99_999_999)


@pytest.mark.process
def test_a_step_that_hangs_is_ended(tokenizer):
    config = settings(f"{FILE}:Bad", tool_timeout_s=1.0)
    partners = partners_of(config, tokenizer, (tokenizer.eos_token_id,))
    [prompt] = partners.opened([prompt_of(tokenizer)], 7)
    completion = play(partners, tokenizer, prompt, ["hang"])
    assert completion.episode.failure == "took longer than its timeout_s, 1"


def test_a_function_that_asks_for_what_was_left_behind_is_told_why(partners, tokenizer):
    [prompt] = partners.opened([prompt_of(tokenizer, environment="echo")], 7)
    assert prompt.text[-1]["content"] == "Go. [Go.]"
    # What the environment says at the beginning holds no control token.
    forged = replace(prompt_of(tokenizer, environment="echo"), text=[{"role": "user", "content": "<s>"}])
    [opened] = partners.opened([forged], 7)
    assert opened.text[-1]["content"] == "<s> [<s>]" and "<s> [<s>]" in tokenizer.decode(opened.token_ids)
    assert tokenizer.convert_tokens_to_ids("<s>") not in opened.token_ids
    completion = play(partners, tokenizer, prompt, ["nothing"])
    why = scores([completion], "locks").failures["locks"][0]
    assert "Echo has no _lock outside of its process: it cannot be pickled" in why


def test_what_came_of_an_environment_outlives_a_crash(tmp_path):
    episode = Episode("Steps", ((2, 0.1), (3, 1 / 3)), 0.5, {"place": "x", "attributes": {"a": "b"}}, None)
    completion = Completion([1, 2, 3], [-0.1] * 3, "stop", "text", ((2, [7]),), episode=episode)
    request = Request([1], [5, 6], max_total_tokens=99)

    def sample(requests, on_finish):
        for index, of in enumerate(requests):
            for number in range(len(of.keys)):
                on_finish(index, number, completion)
        return [[completion] * len(of.keys) for of in requests], None

    Journal(tmp_path, 0).complete(1, [request], None, sample)
    groups, _ = Journal(tmp_path, 0).complete(1, [request], None, lambda requests, _: ([], None))
    assert [asdict(c) for c in groups[0]] == [asdict(completion)] * 2


@pytest.mark.parametrize("place, message", [
    (f"{FILE}:NoReset", "has no method reset"),
    (f"{FILE}:NoMethods", "has no step, and no method that the model could call"),
    (f"{FILE}:OfOpenenv", "is openenv's OfOpenenv, whose turns are not text"),
    (f"{FILE}:Steos", "has no function Steos: did you mean Steps"),
    ("Steps", "give path/to/file.py:name"),
])  # fmt: skip
def test_a_class_that_is_no_environment_is_refused(place, message):
    with pytest.raises(UserError, match=rf"rollout\.environment .*{message}"):
        EnvironmentEntry(place).load("rollout.environment")


def test_rows_without_what_their_environment_needs_are_refused(partners, tokenizer):
    with pytest.raises(UserError, match=r"row 4 .* has environment 'ovner': did you mean owner"):
        partners.check([prompt_of(tokenizer, 4, environment="ovner")])
    with pytest.raises(UserError, match=r"reset of Owner needs goal, and row 4 .* has no such column"):
        partners.check([prompt_of(tokenizer, 4, environment="owner")])
