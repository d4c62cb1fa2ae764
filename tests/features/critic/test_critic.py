"""A critic beside the policy: its values, how it learns, and a run with one."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny_models import build, tiny_config
from workshop import Workshop

from hybrid_grpo.config import PolicyConfig, TrainConfig
from hybrid_grpo.config import build as build_config
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores, TrainBatch
from hybrid_grpo.data.packing import pack, pad
from hybrid_grpo.engine import StepResult
from hybrid_grpo.features.critic.critic import Critic
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.scalar_model import ScalarModel, load_scalar_model
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.policy import ScalarModelTrainer
from hybrid_grpo.run.feature import Scored


@pytest.mark.process
def test_the_command_trains_both_and_saves_both(tmp_path: Path) -> None:
    """The rates fall to 0 at the end of the run: the critic's over three steps, the policy's over its two."""
    shop = Workshop(tmp_path)
    told = ["--critic.enabled=true", "--critic.model=model", "--critic.warmup_steps=1", "--policy.lr_schedule=linear"]
    rates = ["--critic.lr=1e-5", "--policy.lr=1e-6"]
    done = shop.run("train", "--config=train.yaml", "--run.name=run", "--run.steps=3", "--lora.rank=2", *told, *rates)
    shop.close()
    assert done.status == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    alone, *both = [line for line in lines if line["step"]]
    assert [line["critic/lr"] for line in (alone, *both)] == pytest.approx([1e-5, 1e-5 * 2 / 3, 1e-5 / 3])
    assert "policy/lr" not in alone and [line["policy/lr"] for line in both] == pytest.approx([1e-6, 1e-6 / 2])
    assert alone["critic/value"] == 0.0 and both[-1]["critic/value"] != 0.0 and both[-1]["time/critic_s"] > 0
    files = {path.name for path in (tmp_path / "runs/run/checkpoints/step_000003/critic").iterdir()}
    assert files == {"policy_00000_of_00001.pt", "state_00000_of_00001.pt"}


@pytest.mark.parametrize("share", ["on", "off", "padded"])
def test_a_value_is_that_of_the_state_before_its_token(tmp_path: Path, share: Any) -> None:
    """Against transformers' own forward of each row; rows of a prompt share it, and the last token is never read."""
    build(tiny_config("qwen2", tie_word_embeddings=False)).save_pretrained(tmp_path)
    policy = PolicyConfig(model=str(tmp_path), dtype="float32")
    model = load_scalar_model(policy, "eager" if share == "padded" else ATTENTION, seed=1)
    plain = load_scalar_model(policy, "eager", seed=1)
    critic = Critic.__new__(Critic)
    critic.engine = cast(Any, ScalarModel(model))
    critic.engine.device = torch.device("cpu")
    prompts = [[1, 2, 3], [1, 2, 3], [1, 2, 3], [9, 8]]
    completions = [[4], [5, 6, 7], [5, 8], [10, 11, 12, 13]]
    given = TokenRow.of(prompts, completions), 9, torch.device("cpu")
    batches = pad(*given) if share == "padded" else pack(*given, share=share)
    assert len(batches) > 1
    value_BT = critic.values(batches, (4, 4))
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        hidden_1SD = plain.base_model(torch.tensor([[*prompt, *completion[:-1]]])).last_hidden_state
        expected_T = plain.score(hidden_1SD[0, len(prompt) - 1 :]).squeeze(-1)
        assert expected_T.abs().min() > 1e-4
        assert value_BT[row, : len(completion)].tolist() == pytest.approx(expected_T.tolist(), abs=1e-5)
        assert not value_BT[row, len(completion) :].any()


class Table:
    """An engine whose model has one number for each token: the value of the token that follows it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.values, self.rates = torch.zeros(20, requires_grad=True), list[float]()

    def __call__(self, ids_bS: torch.Tensor, positions: Any, source: Any, segments: Any) -> torch.Tensor:
        return source(self.values[ids_bS].flatten())

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, lr: float) -> StepResult:
        assert self.values.grad is not None
        self.values.data -= lr * self.values.grad
        self.values.grad = None
        self.rates.append(lr)
        return StepResult(1.0, True)


def test_a_critic_learns_the_returns_at_its_own_rate_and_at_first_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all optimizer steps of the run, at a rate that falls to 0; the policy waits for the first two steps."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(
        ScalarModelTrainer, "__init__", lambda self, policy, *_, **given: made.update(given, policy=policy)
    )
    own = {"enabled": True, "lr": 0.5, "warmup_steps": 2, "clip": 0.0, "whiten": False}
    config = build_config(TrainConfig, {
        "run": {"steps": 3}, "critic": own, "policy": {"model": "m", "lr": 1e-6, "lr_schedule": "linear"},
        "rollout": {"prompts_per_step": 2, "num_generations": 1}, "grpo": {"num_iterations": 2, "beta": 0.5},
    })  # fmt: skip
    critic, table = Critic(config, batch_plan(config, 1), None), Table()
    assert made["total_steps"] == 6 and made["head_std"] == 0.0 and made["policy"].lr == 0.5
    critic.config, critic.total_steps, critic.engine = made["policy"], made["total_steps"], cast(Any, table)
    critic.movement = cast(Any, SimpleNamespace(begin=lambda: None, end=lambda lr: None))
    critic.optimizer_steps = critic.skipped_steps = 0
    rollout = Rollout(
        [Prompt(k, "", [1], {}) for k in range(2)],
        [Completion([2, 3], [-1.0] * 2, "stop"), Completion([4], [-1.0], "stop")],
        1,
    )
    monkeypatch.setattr("hybrid_grpo.data.packing.all_reduce", lambda value, op: value + 1)
    batches = pack(TokenRow.of([[1], [1]], [[2, 3], [4]]), 2, Table.device, share="off")
    assert [len(micro.rows) for micro in batches] == [1, 1, 0], "another rank has more"
    kl_BT, reward_B = torch.tensor([[0.5, 1.0], [2.0, 0.0]]), torch.tensor([1.0, 3.0], dtype=torch.float64)
    returns, alone, lines, beats = {(0, 1): 1 - 0.1 * 1.5, (0, 2): 1 - 0.1 * 1.0, (1, 1): 3 - 0.1 * 2.0}, [], [], []
    expected = torch.zeros(20)
    for step in range(3):
        scored = Scored(rollout, Scores(reward_B, {}, {}), None, kl_BT, 0.1, lambda: batches)
        advantages_BT, _ = critic.advantages(scored)
        for (row, token), value in returns.items():
            assert advantages_BT[row, token - 1].item() == pytest.approx(value - expected[token].item(), abs=1e-6)
        for _ in range(2):
            alone.append(critic.learns_alone)
            given = [
                TrainBatch(micro, kl_BT, None, None, kl_BT, micro.mask_bT * 0.25) for micro in batches if micro.rows
            ]
            numbers = list(critic.learn(given, partial(beats.append, step)))
            old, rate = expected.clone(), 0.5 * (1 - len(lines) / 6)
            for (_, token), value in returns.items():
                expected[token] -= rate * 0.25 * (old[token] - value)
            assert torch.allclose(table.values.detach(), expected)
            loss = sum(0.125 * (old[token] - value) ** 2 for (_, token), value in returns.items())
            assert sum(of["critic/loss"][0].item() for of in numbers[:-1]) == pytest.approx(float(loss) / 2)
            lines.append(numbers[-1]["critic/lr"][0])
    assert alone == [True] * 4 + [False] * 2 and beats == [0] * 4 + [1] * 4 + [2] * 4
    assert lines == table.rates == pytest.approx([0.5 * (1 - k / 6) for k in range(6)])
