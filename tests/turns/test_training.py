"""Training with a tool and an environment, or an agent, from the command: a random model whose logits favor calls."""

import json

import forks
import pytest
from paths import ROOT, SUPPORT

pytestmark = pytest.mark.ranks

ENVIRONMENT = ["--rollout.environment", f"{SUPPORT / 'slow_tools.py'}:Repeats"]
AGENT = ["--rollout.agent", f"{SUPPORT / 'agents.py'}:talks", "--rollout.tools", "[]"]
AGENT += ["--rollout.max_turns", "5", "--rollout.max_total_tokens", "128", "--rollout.logit_bias", "{}"]
AGENT += ["--rollout.logprobs", "mask", "--rollout.top_k", "40"]
# 8 pages of 32 entries: whoever waits is put back, and read again.
SQUEEZED = ["--rollout.max_slots", "4", "--rollout.cache_gb", "0.00045"]
RUNS = {
    "alone": (1, ENVIRONMENT),
    "squeezed on two ranks": (2, [*ENVIRONMENT, *SQUEEZED]),
    "agent": (1, AGENT),
    "agent squeezed on two ranks": (2, [*AGENT, *SQUEEZED]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lookup")
    made = forks.run(ROOT / "training_scripts/lookup_task.py", folder)
    assert made.status == 0, made.err
    vocabulary = json.loads((folder / "model/tokenizer.json").read_text())["added_tokens"]
    ids = {piece["content"]: piece["id"] for piece in vocabulary}
    call, called = (next(i for piece, i in ids.items() if part in piece) for part in ('"look_up"', "</tool_call>"))
    bias = {str(call): 4.0, str(called): 4.0, str(ids["<|im_end|>"]): 3.0}
    found = {}
    for name, (world, more) in RUNS.items():
        run = folder / "runs" / name.replace(" ", "-")
        done = forks.run(
            *("-m", "hybrid_grpo", "train", "--config", ROOT / "training_scripts/lookup.yaml"),
            *("--run.dir", folder / "runs", "--run.name", run.name, "--run.steps", "2"),
            *("--policy.model", folder / "model", "--data.path", folder / "train.jsonl", "--log.wandb", "disabled"),
            *("--rollout.prompts_per_step", "4", "--rollout.num_generations", "6", "--eval.every", "0"),
            *("--rollout.tools", json.dumps([f"{SUPPORT / 'slow_tools.py'}:look_up"]), "--rollout.max_turns", "5"),
            *("--rollout.logit_bias", json.dumps(bias), "--rollout.max_completion_tokens", "36"),
            *("--rewards", json.dumps([f"{SUPPORT / 'acting_rewards.py'}:messages_said"])),
            *("--engine.zero_stage", "0", *more), world=world, cwd=folder,
        )  # fmt: skip
        assert done.status == 0, done.out + done.err
        lines = [json.loads(line) for line in (run / "rollouts/step_000002.jsonl").read_text().splitlines()]
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found[name] = (lines, metrics)
    return found


@pytest.mark.parametrize("one, other", [("alone", "squeezed on two ranks"), ("agent", "agent squeezed on two ranks")])
def test_neither_ranks_nor_memory_nor_delays_change_a_run(runs, one, other):
    (lines, metrics), (others, theirs) = runs[one], runs[other]
    same = ("prompt_id", "sample", "prompt", "messages", "length", "finish", "reward", "rewards", "steps", "advantage")
    said = [[line.get(name) for name in same] for line in lines]
    assert [[line.get(name) for name in same] for line in others] == said
    names = ["policy/loss", "policy/grad_norm", "turns/mean", "turns/given_tokens"]
    names += ["agent/histories", "agent/failed_frac"] if one == "agent" else ["tool/look_up/calls"]
    for mine, its in zip(metrics, theirs, strict=True):
        for name in names:
            assert its[name] == pytest.approx(mine[name], rel=1e-5, abs=1e-7), name


def test_conversations_are_counted_and_sampler_and_training_agree(runs):
    lines, metrics = runs["alone"]
    spoken = [sum(message["role"] == "assistant" for message in line["messages"]) for line in lines]
    assert max(spoken) >= 3
    assert metrics[-1]["turns/mean"] == pytest.approx(sum(spoken) / len(lines))
    calls = [call for line in lines for m in line["messages"][:-1] for call in m.get("tool_calls", ())]
    assert 0 < metrics[-1]["tool/look_up/calls"] <= len(calls)
    assert metrics[-1]["tool/look_up/failed_frac"] == 0
    assert metrics[-1]["tool/unknown/calls"] > 0
    for name, (_, steps) in runs.items():
        assert all(step["parity/logp_abs_diff_max"] < 1e-4 for step in steps), name
    assert metrics[-1]["policy/grad_norm"] > 0


def test_an_environment_answers_turns_without_a_call_and_rewards_them(runs):
    lines, metrics = runs["alone"]
    assert metrics[-1]["environment/resets"] == len(lines)
    assert metrics[-1]["environment/failed_frac"] == 0
    for number, line in enumerate(lines):
        assert line["prompt"][-1]["content"][-1] in "abcdefgh"
        assert line["prompt"] == lines[number - number % 6]["prompt"], "a group begins alike"
        answered = [message for message in line["messages"] if message["role"] == "user"]
        assert len(line["steps"]) <= 2 and len(answered) <= 1
        earned = sum(reward for _, reward in line["steps"])
        assert (line["rewards"]["Repeats"] or 0.0) == pytest.approx(earned)
    assert max(len(line["steps"]) for line in lines) == 2, "some are over by themselves"
    assert metrics[-1]["reward/Repeats/mean"] > 0


def test_histories_of_an_agent_share_rewards(runs):
    """Those of its two roles: a completion's reward is their mean."""
    lines, metrics = runs["agent"]
    assert metrics[-1]["agent/histories"] > 1 and metrics[-1]["agent/failed_frac"] == 0
    assert metrics[-1]["reward/talks/mean"] == pytest.approx(
        sum(line["rewards"]["talks"] for line in lines) / len(lines)
    )
    assert len({line["advantage"] for line in lines}) > 1 and all(len(line["steps"]) == 2 for line in lines)
    assert sum(len(line.get("chats", ())) + 1 for line in lines) == len(lines) * metrics[-1]["agent/histories"]
    assert [sum(share for _, share in line["steps"]) for line in lines] == [line["rewards"]["talks"] for line in lines]
