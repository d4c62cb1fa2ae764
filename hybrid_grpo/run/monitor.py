"""What the stages of a step look like in numbers: from their records to the meter."""

from __future__ import annotations

import psutil
import torch
from torch import Tensor

from hybrid_grpo.config import EvalConfig
from hybrid_grpo.data.batch import Completion, MicroBatch, RewardStatus, Rollout, Scores
from hybrid_grpo.grpo.advantages import group_stats
from hybrid_grpo.grpo.loss import CorrectionStats, LossStats
from hybrid_grpo.run.metrics import Meter


def measure_rollout(meter: Meter, rollout: Rollout, scores: Scores, outcome: str, threshold: float) -> None:
    """Rewards, groups and completions of a rollout."""
    rows, group_size = len(rollout.completions), rollout.num_generations
    reward_B = scores.reward_B
    measure_rewards(meter, scores, group_size)
    stats = group_stats(reward_B, scores.by_function[outcome], group_size, threshold, scores.steps)
    meter.add("group/count", stats.groups)
    for name, count in (("zero_std", stats.zero_std), ("all_right", stats.all_right), ("all_wrong", stats.all_wrong)):
        meter.add(f"group/{name}_frac", count / stats.groups, stats.groups)
    measure_lengths(meter, "completion", rollout.completions)
    meter.add("completion/length_max", max(len(c.token_ids) for c in rollout.completions))
    tokens = [tuple(c.token_ids) for c in rollout.completions]
    groups = [tokens[i : i + group_size] for i in range(0, rows, group_size)]
    meter.add("completion/duplicate_frac", 1 - sum(len(set(group)) for group in groups) / rows, rows)


def measure_rewards(meter: Meter, scores: Scores, group_size: int) -> None:
    """What the reward functions said, of completions that have a reward; and where functions failed."""
    scored_B = scores.reward_B[~scores.reward_B.isnan()]
    if len(scored_B):
        meter.add("reward/mean", scored_B.mean(), len(scored_B))
        meter.add("reward/max", scored_B.max())
        meter.add("reward/min", scored_B.min())
    reward_PG = scores.reward_B.view(-1, group_size)
    count_P = (~reward_PG.isnan()).sum(1)
    squares_P = (reward_PG - reward_PG.nanmean(1, keepdim=True)).square().nansum(1)
    spread_P = (squares_P / (count_P - 1)).sqrt()[count_P > 1]
    meter.add("reward/std", spread_P.mean(), len(spread_P))
    for name, value_B in scores.by_function.items():
        status_B = scores.status[name]
        meter.add(f"reward/{name}/mean", value_B.nanmean(), int((~value_B.isnan()).sum()))
        for what, counts_B in (
            ("none", status_B == RewardStatus.NOT_APPLICABLE),
            ("failed", status_B >= RewardStatus.FAILED),
            ("timeout", status_B == RewardStatus.TIMED_OUT),
        ):
            meter.add(f"reward/{name}/{what}_frac", counts_B.double().mean(), len(status_B))


def measure_lengths(meter: Meter, stage: str, completions: list[Completion]) -> None:
    """Mean length of completions and the share that was cut."""
    count = len(completions)
    meter.add(f"{stage}/length_mean", sum(len(c.token_ids) for c in completions) / max(count, 1), count)
    meter.add(f"{stage}/clipped_frac", sum(c.finish == "length" for c in completions) / max(count, 1), count)


def measure_eval(meter: Meter, config: EvalConfig, outcome: str, completions: list[Completion], scores: Scores) -> None:
    """Accuracy and reward of the greedy completions of this rank's share of the held-out prompts."""
    stage, count = f"eval/{config.name}", len(completions)
    right_B = scores.by_function[outcome] >= config.threshold
    meter.add(f"{stage}/accuracy", right_B.double().mean(), count)
    meter.add(f"{stage}/reward_mean", scores.reward_B.nanmean(), int((~scores.reward_B.isnan()).sum()))
    failed_B = torch.stack([status_B >= RewardStatus.FAILED for status_B in scores.status.values()]).any(0)
    meter.add(f"{stage}/failed_frac", failed_B.double().mean(), count)
    measure_lengths(meter, stage, completions)


def measure_loss(meter: Meter, stats: LossStats, entropy_bT: Tensor, weight_bT: Tensor, with_kl: bool) -> None:
    """Per-token numbers of one micro-batch of training."""
    tokens = int(stats.tokens)
    if not tokens:
        return
    meter.add("policy/entropy", entropy_bT[weight_bT > 0].mean(), tokens)
    meter.add("policy/clip_frac_low", stats.clipped_low / tokens, tokens)
    meter.add("policy/clip_frac_high", stats.clipped_high / tokens, tokens)
    meter.add("policy/ratio_max", stats.ratio_max)
    if with_kl:
        meter.add("policy/kl", stats.kl / tokens, tokens)


def measure_parity(meter: Meter, micro: MicroBatch, logp_bT: Tensor, old_logp_bT: Tensor) -> None:
    """How far the sampler was from the training forward of the same weights."""
    if micro.rows:
        gap_N = (logp_bT.detach() - old_logp_bT)[micro.mask_bT].abs()
        meter.add("parity/logp_abs_diff_mean", gap_N.mean(), len(gap_N))
        meter.add("parity/logp_abs_diff_max", gap_N.max())


def measure_correction(meter: Meter, stats: CorrectionStats) -> None:
    """How far the training forward is from the sampler where the loss corrects for it."""
    tokens = int(stats.tokens)
    if tokens:
        meter.add("parity/ratio_mean", stats.mean, tokens)
        meter.add("parity/ratio_max", stats.max)
        meter.add("parity/corrected_frac", stats.fraction, tokens)


def measure_memory(meter: Meter) -> None:
    """Peak of the GPU since the last call, and host memory now."""
    meter.add("memory/rss_gb", psutil.Process().memory_info().rss / 1e9)
    if torch.cuda.is_available():
        meter.add("memory/peak_gb", torch.cuda.max_memory_allocated() / 1e9)
        torch.cuda.reset_peak_memory_stats()
