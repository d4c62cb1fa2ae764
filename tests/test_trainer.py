"""The parts of a step that need no engine: rewards beside sampling, and which log-probabilities the loss takes."""

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hybrid_grpo.checks import batch_plan
from hybrid_grpo.config import RolloutConfig, TrainConfig
from hybrid_grpo.data.batch import Completion, MicroBatch, Prompt, Rollout, TrainBatch
from hybrid_grpo.rewards.loading import Reward
from hybrid_grpo.rewards.scoring import Rewards
from hybrid_grpo.rewards.streaming import Stream
from hybrid_grpo.trainer import Trainer

P, G = 8, 2


class Sampler:
    """Stands for a policy: finishes a group every `seconds`, and scores every token with log 1/2."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.engine = SimpleNamespace(switch_time=SimpleNamespace(gather_s=0.0, release_s=0.0))

    def rollout(self, prompts, config, stop_ids, *, seed, step, on_finish):
        rows = []
        for i in range(len(prompts)):
            time.sleep(self.seconds)
            for k in range(G):
                rows.append(Completion([i, k], [-1.0, -1.0], "stop", f"{i}{k}"))
                on_finish(i, k, rows[-1])
        return Rollout(prompts, rows, G), None

    def logprobs(self, micro, temperature):
        return torch.full(micro.mask_bT.shape, math.log(0.5), requires_grad=True), torch.zeros(micro.mask_bT.shape)


def slow(completions):
    time.sleep(0.05)
    return [float(text) for text in completions]


def trainer(policy: Sampler, **rollout) -> Trainer:
    config = TrainConfig(rollout=RolloutConfig(prompts_per_step=P, num_generations=G, **rollout))
    task = SimpleNamespace(
        rewards=Rewards([Reward("slow", 1.0, slow, {}, frozenset(), frozenset({"completions"}))]),
        prompts=[Prompt(i, f"p{i}", [1], {}) for i in range(P)],
        eval_prompts=[],
        stop_ids=(),
    )
    return Trainer(config, batch_plan(config, 1), policy, None, task, torch.device("cpu"))


def test_rewards_run_while_others_are_sampled():
    run = trainer(Sampler(seconds=0.06))
    prompts = run.draw_prompts()
    with Stream(run.task.rewards, prompts, G) as stream:
        run.sample(prompts, 1, stream.add)
        scores = run.score(stream)
    assert scores.reward_B.tolist() == [10.0 * i + k for i in range(P) for k in range(G)]
    values = run.meter.reduce()
    assert values["time/reward_s"] >= P * 0.05
    assert 0 < values["time/reward_wait_s"] < 0.4 * values["time/reward_s"]


@pytest.mark.parametrize("logprobs, on_policy, ratio", [
    ("softmax", True, 1.0),
    ("softmax", False, 0.5 / math.exp(-0.8)),
    ("sampling", True, 0.5 / math.exp(-0.8)),
    ("sampling", False, 0.5 / math.exp(-0.8)),
])  # fmt: skip
def test_the_filtered_distribution_s_logprobs_are_used_from_the_first_step(logprobs, on_policy, ratio):
    mask_bT = torch.ones(1, 2, dtype=torch.bool)
    micro = MicroBatch([0], torch.ones(1, 3, dtype=torch.int64), mask_bT, mask_bT)
    batch = TrainBatch(micro, torch.full((1, 2), -0.8), None, torch.ones(1), mask_bT / 2)
    run = trainer(Sampler(), logprobs=logprobs)
    run.config = replace(run.config, grpo=replace(run.config.grpo, epsilon_low=0.9, epsilon_high=0.9))
    loss = run.loss(batch, on_policy)[0].detach()
    assert loss.item() == pytest.approx(-ratio)
    assert run.meter.reduce()["policy/ratio_max"] == pytest.approx(ratio)
