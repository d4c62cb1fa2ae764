"""Several sources: exact shares, the same prompts however many ranks there are, and after a resume."""

import json
import random
from fractions import Fraction

import forks
import pytest
from char_tokenizer import char_tokenizer, ids
from launching import make_task

from hybrid_grpo.config import BatchPlan, DataConfig, RewardConfig, RunConfig, TrainConfig, build
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import configure, parse
from hybrid_grpo.data.batch import Completion, Prompt
from hybrid_grpo.data.completions import read_step
from hybrid_grpo.data.loader import StepLoader, quotas
from hybrid_grpo.data.prompts import read_prompts
from hybrid_grpo.rewards.loader import load_rewards
from hybrid_grpo.rewards.scorer import Rewards

SIZES = {"a": 7, "b": 5, "c": 40}


def mixture(*weights: float) -> list[dict]:
    return [{"path": "x", "name": name, "weight": weight} for name, weight in zip(SIZES, weights, strict=False)]


def streams(
    sources: list[dict], step: int = 12, world: int = 1, minibatches: int = 1, seed: int = 0, shuffle: bool = True
) -> list[StepLoader]:
    """The stream of every rank."""
    names = [name for source in sources for name in [source["name"]] * SIZES[source["name"]]]
    prompts = [Prompt(number, name, [1], {}, source=name) for number, name in enumerate(names)]
    config = TrainConfig(data=DataConfig(mixture=sources, shuffle=shuffle), run=RunConfig(seed=seed))
    plan = BatchPlan(world, step // world, 2, minibatches, 1)
    return [StepLoader(prompts, config, plan, rank) for rank in range(world)]


def steps(ranks: list[StepLoader], count: int, minibatches: int = 1) -> list[list[tuple[int, int]]]:
    """Prompts of the next steps and their epochs, minibatch after minibatch, each from rank to rank."""
    found = []
    for _ in range(count):
        drawn = [[(prompt.id, prompt.epoch) for prompt in rank.next_prompts(minibatches)] for rank in ranks]
        share = len(drawn[0]) // minibatches
        found.append([item for b in range(minibatches) for own in drawn for item in own[b * share : (b + 1) * share]])
        for rank in ranks:
            rank.update()
    return found


def counts(step: list[tuple[int, int]], sizes: list[int]) -> list[int]:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [sum(start <= item < start + size for item, _ in step) for start, size in zip(starts, sizes, strict=True)]


@pytest.mark.parametrize(
    ("weights", "expected"), [((2, 1, 3), [4, 2, 6]), ((0.5, 0.25, 0.25), [6, 3, 3]), ((5, 1), [10, 2])]
)
def test_whole_shares_are_exact_in_every_step_and_spread_over_its_minibatches(weights, expected):
    sizes = list(SIZES.values())[: len(weights)]
    for step in steps(streams(mixture(*weights)), 40):
        assert counts(step, sizes) == expected
        assert all(abs(c - e / 2) <= 1 for c, e in zip(counts(step[:6], sizes), expected, strict=True))


def test_other_shares_are_within_one_in_every_step_and_exact_over_time():
    rng = random.Random(0)
    for _ in range(200):
        weights = [Fraction(rng.randint(1, 40)) for _ in range(rng.randint(2, 7))]
        weights = [weight / sum(weights) for weight in weights]
        drawn, size = [0] * len(weights), rng.randint(1, 30)
        for _ in range(50):
            count = size if rng.random() < 0.9 else rng.randint(1, 30)  # as when groups are drawn again
            own = quotas(weights, drawn, count)
            assert sum(own) == count and all(abs(n - w * count) < 1 for n, w in zip(own, weights, strict=True))
            drawn = [had + n for had, n in zip(drawn, own, strict=True)]
            assert all(abs(had - w * sum(drawn)) < 1.25 for had, w in zip(drawn, weights, strict=True))


def test_every_source_passes_over_its_own_rows_in_an_order_that_others_do_not_change():
    first = [item for step in steps(streams(mixture(2, 1, 3)), 30) for item in step]
    of_a = [item for item, _ in first if item < 7]
    epochs = [of_a[start : start + 7] for start in range(0, 119, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and len(set(map(tuple, epochs))) > 10
    assert [epoch for item, epoch in first if item < 7][:21] == [0] * 7 + [1] * 7 + [2] * 7
    alone = [item for step in steps(streams(mixture(1, 1)), 15) for item, _ in step if item < 7]
    assert alone[:60] == of_a[:60]
    assert [item for item, _ in steps(streams(mixture(3, 1), shuffle=False), 1)[0] if item < 7] == [*range(7), 0, 1]


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("weights", [(2, 1, 3), (0.31, 0.2, 0.7)])
def test_the_prompts_are_the_same_on_any_number_of_ranks_and_after_a_resume(weights, minibatches):
    alone = steps(streams(mixture(*weights), minibatches=minibatches), 8, minibatches)
    for world in (2, 3):
        ranks = streams(mixture(*weights), world=world, minibatches=minibatches)
        assert steps(ranks, 4, minibatches) == alone[:4]
        states = {json.dumps(rank.state_dict()) for rank in ranks}
        assert len(states) == 1
        for other in (1, 2, 3):
            resumed = streams(mixture(*weights), world=other, minibatches=minibatches)
            steps(resumed, 1, minibatches)  # a stale position must not show through
            for rank in resumed:
                rank.load_state_dict(json.loads(*states))
            assert steps(resumed, 4, minibatches) == alone[4:]


def test_a_run_goes_on_with_other_weights_and_sources_where_each_source_was():
    (saved,) = streams(mixture(2, 1, 3))
    steps([saved], 3, 1)
    state = json.loads(json.dumps(saved.state_dict()))
    for sources in (mixture(1, 1, 3), mixture(2, 1)):
        (other,) = streams(sources)
        other.load_state_dict(state)
        places = other.state_dict()["mixture"]
        assert places == {name: state["mixture"][name] for name in places} and len(places) == len(sources)
    without = StepLoader([Prompt(n, "p", [1], {}) for n in range(52)], TrainConfig(), BatchPlan(1, 12, 2, 1, 1), 0)
    without.load_state_dict(state)
    assert without.position == saved.position == 36
    (one,) = streams(mixture(2, 1, 3))
    one.load_state_dict(without.state_dict())
    assert one.position == 36 and not any(of["offset"] for of in one.state_dict()["mixture"].values())


def test_prompts_of_all_sources_have_all_columns_and_their_source():
    sources = [
        {"path": [{"prompt": "ab", "answer": "1"}, {"prompt": "x" * 99, "answer": "2"}], "name": "one", "weight": 2},
        {"path": [{"prompt": "c", "tests": ["t"], "data_source": "own"}], "name": "two"},
    ]
    prompts, report = read_prompts(DataConfig(mixture=sources, max_prompt_tokens=9), char_tokenizer())
    assert [(p.id, p.source, p.token_ids) for p in prompts] == [(0, "one", ids("ab")), (2, "two", ids("c"))]
    assert [p.columns for p in prompts] == [
        {"data_source": "one", "answer": "1", "tests": None},
        {"data_source": "own", "answer": None, "tests": ["t"]},
    ]
    assert (
        report.startswith("one (weight 2) is a list [train]: 1 of 2 rows kept, 1 dropped")
        and " | two (weight 1) is" in report
    )


def test_a_reward_is_called_for_its_sources_alone():
    def length(completions):
        return [float(len(text)) for text in completions]

    def one(completions):
        return [1.0 for _ in completions]

    config = configure(
        TrainConfig,
        {
            "data": {"mixture": mixture(1, 1)},
            "rewards": [{"function": length, "sources": ["b"], "batch_size": 4}, {"function": one}],
        },
    ).config
    rewards = Rewards(load_rewards(config.rewards))
    prompts = [Prompt(0, "p", [1], {}, source="a"), Prompt(1, "p", [1], {}, source="b"), Prompt(2, "p", [1], {})]
    scores = rewards.score(prompts, [Completion([1], [0.0], "stop", "abc")] * 3)
    assert scores.by_function["length"].isnan().tolist() == [True, False, False]
    # What tells right from wrong: the function that is named, or the first that applies to a prompt of a source.
    assert scores.right_B("length", prompts).tolist() == [1.0, 3.0, 3.0]
    assert scores.right_B("one", prompts).tolist() == [1.0, 1.0, 1.0]
    assert scores.reward_B.tolist() == [1.0, 4.0, 4.0] and (scores.status["length"] >= 2).sum() == 0


def test_a_reward_needs_a_column_that_its_sources_have_themselves():
    """Prompts have the columns of all sources, so that a function for a source without the column was found fit, and
    returned None in every step."""
    rows = {"ok": {"prompt": "ab", "answer": "a"}, "other": {"prompt": "ba", "gold": "b"}}
    data = DataConfig(mixture=[{"path": [row], "name": name} for name, row in rows.items()])
    prompts, _ = read_prompts(data, char_tokenizer())

    def check(*sources: str) -> None:
        Rewards(load_rewards([RewardConfig("exact_match", sources=list(sources))])).check_prompts(prompts)

    for sources in ((), ("ok",), ("ok", "other")):
        check(*sources)
    with pytest.raises(UserError, match="exact_match needs answer, which is neither a column of source other nor in"):
        check("other")


def test_a_source_without_a_reward_is_refused_unless_something_else_teaches_it():
    """Its completions all had reward 0, without a word. A feature may be what teaches it, or an environment."""
    given = {"data": {"mixture": mixture(1, 1)}, "rewards": [{"function": "exact_match", "sources": ["b"]}]}
    with pytest.raises(UserError, match=r"rewards: no function is for source a of data.mixture, .* add a to the `sou"):
        build(TrainConfig, given)
    for other in (
        {"features": ["mine.py:Mine"]},
        {"rollout": {"environment": "mine.py:Game"}},
        {"rewards": [*given["rewards"], "repetition_penalty"]},
    ):
        build(TrainConfig, {**given, **other})


def test_sources_of_tasks_are_those_of_their_recipes():
    data = parse(
        TrainConfig,
        ["--data.mixture", "[{task: gsm8k, weight: 3}, {task: code, limit: 5}, {task: math, path: mine.jsonl}]"],
        "train",
    ).config.data
    assert [(s.name, s.path, s.subset, s.limit, s.weight) for s in data.mixture] == [
        ("gsm8k", "openai/gsm8k", "main", None, 3.0),
        ("code", "google-research-datasets/mbpp", "full", 5, 1.0),
        ("math", "mine.jsonl", None, None, 1.0),
    ]
    assert data.chat_template == "always"  # as in each of the recipes
    assert (
        parse(TrainConfig, ["--data.mixture", "[{task: gsm8k}, {path: x}]"], "train").config.data.chat_template
        == "auto"
    )


@pytest.mark.process
def test_a_run_of_a_mixture_tells_the_numbers_of_every_source(tmp_path):
    """Quotas, rewards of one source, numbers of each, and its name in the rollouts, which `score` reads again."""
    make_task(tmp_path)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "one and two", "answer": "three"}\n' * 5)
    (tmp_path / "held_out.jsonl").write_text(
        '{"prompt": "One and  two!", "answer": "three"}\n{"prompt": "ba=", "answer": "ab"}\n'
    )
    data = "[{task: letters, limit: 6, weight: 2}, {path: sums.jsonl}]"
    rewards = "[{function: letters_in_place, sources: [letters]}, {function: exact_match, sources: [sums]}]"
    arguments = [
        *("--policy.model=model", "--policy.dtype=float32", "--engine.zero_stage=0"),
        *("--log.wandb=disabled", "--log.rollouts_every=1", "--run.steps=2", f"--data.mixture={data}"),
        *(f"--rewards={rewards}", "--rollout.prompts_per_step=6", "--rollout.num_generations=2"),
        *("--rollout.max_completion_tokens=6", "--data.eval_path=held_out.jsonl", "--eval.every=2"),
        "--run.name=run",
    ]
    done = forks.run("-m", "hybrid_grpo", "train", *arguments, cwd=tmp_path)
    assert done.status == 0, done.err
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    for row in (row for row in rows if "policy/loss" in row):
        assert (row["source/letters/count"], row["source/sums/count"]) == (4.0, 2.0)
        assert row["source/letters/reward"] == pytest.approx(row["reward/letters_in_place/mean"])
        assert row["source/sums/reward"] == pytest.approx(row["reward/exact_match/mean"])
        assert 0.0 <= row["source/sums/accuracy"] <= row["source/sums/reward"]
        assert row["reward/letters_in_place/none_frac"] == pytest.approx(1 / 3)
    assert len([row for row in rows if "policy/loss" in row]) == 2
    # Held-out prompts are of no source, so every function scores them; one is a prompt to train on.
    assert all(0.0 <= row["eval/heldout/accuracy"] <= 1.0 for row in (rows[0], rows[-1]))
    assert "; 1 of them is also among the training prompts: see docs/data.md" in done.out
    saved = [json.loads(line) for line in (tmp_path / "runs/run/rollouts/step_000001.jsonl").read_text().splitlines()]
    assert [row["source"] for row in saved].count("sums") == 4
    assert {(row["source"], row["columns"]["data_source"]) for row in saved} == {(n, n) for n in ("letters", "sums")}
    rollout, _ = read_step(tmp_path / "runs/run/rollouts/step_000001.jsonl")
    assert sorted(prompt.source for prompt in rollout.prompts) == ["letters"] * 4 + ["sums"] * 2
