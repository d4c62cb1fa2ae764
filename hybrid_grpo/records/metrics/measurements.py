"""Computes the catalogue's metrics from the results of a step's stages.

The functions return `Numbers`, which a `Meter` reduces.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch
from torch import Tensor

from hybrid_grpo.data.batch import Completion, Numbers, RewardStatus, Rollout, Scores, TrainBatch
from hybrid_grpo.distributed.hardware import peak_flops
from hybrid_grpo.distributed.ranks import world_size
from hybrid_grpo.grpo.advantages import informative
from hybrid_grpo.grpo.baselines import centered, differ
from hybrid_grpo.model.flops import Cost, Floats
from hybrid_grpo.model.routing import Replay
from hybrid_grpo.model.sidecars import find
from hybrid_grpo.records.metrics.meter import Meter, Span
from hybrid_grpo.rewards.rules import repeated_share

if TYPE_CHECKING:
    from hybrid_grpo.engine import Engine
    from hybrid_grpo.policy import Policy

_NGRAM = 3
"""Number of tokens in the n-grams whose repetition is measured, as in the built-in reward `repetition_penalty`."""

_TERA = 1e12


def measure_step(rollout: Rollout, scores: Scores, outcome: str, threshold: float, own: int) -> Numbers:
    """Return the metrics of a rollout and its scores, for the policy's own completions: the first `own` per group."""
    size = rollout.num_generations
    rollout, scores = rollout.first(own), scores.first(own, size)
    return measure_rollout(rollout, scores, outcome, threshold) | measure_health(rollout, scores)


def measure_rollout(rollout: Rollout, scores: Scores, outcome: str, threshold: float) -> Numbers:
    """Return the metrics of a rollout's rewards, groups and completions."""
    rows, group_size = len(rollout.completions), rollout.num_generations
    outcome_B = scores.right_B(outcome, rollout.prompts)
    # An outcome that is NaN, since its function does not apply or has failed, is wrong.
    right_PG = (outcome_B >= threshold).view(-1, group_size)
    of_groups = {
        "zero_std": ~informative(scores.reward_B, group_size, scores.steps),
        "all_right": right_PG.all(1),
        "all_wrong": (~right_PG).all(1),
    }
    tokens = [tuple(c.token_ids) for c in rollout.completions]
    groups = [tokens[i : i + group_size] for i in range(0, rows, group_size)]
    return {
        **measure_rewards(scores, group_size), **measure_sources(rollout, scores, outcome_B, threshold),
        "group/count": (len(right_PG), 1),
        **{f"group/{what}_frac": (is_P.double().mean(), len(is_P)) for what, is_P in of_groups.items()},
        **measure_lengths("completion", rollout.completions), **measure_turns(rollout),
        "completion/length_max": (max(rollout.lengths), 1),
        "completion/duplicate_frac": (1 - sum(len(set(group)) for group in groups) / rows, rows),
    }  # fmt: skip


def measure_rewards(scores: Scores, group_size: int) -> Numbers:
    """Return statistics of the rewards, over completions that have one, and of the reward functions' failures."""
    numbers: Numbers = {}
    scored_B = scores.reward_B[~scores.reward_B.isnan()]
    if len(scored_B):
        numbers["reward/mean"] = scored_B.mean(), len(scored_B)
        numbers["reward/max"] = scored_B.max(), 1
        numbers["reward/min"] = scored_B.min(), 1
    reward_PG = scores.reward_B.view(-1, group_size)
    count_P = (~reward_PG.isnan()).sum(1)
    squares_P = (reward_PG - reward_PG.nanmean(1, keepdim=True)).square().nansum(1)
    spread_P = (squares_P / (count_P - 1)).sqrt()[count_P > 1]
    numbers["reward/std"] = spread_P.mean(), len(spread_P)
    for name, value_B in scores.by_function.items():
        status_B = scores.status[name]
        numbers[f"reward/{name}/mean"] = value_B.nanmean(), int((~value_B.isnan()).sum())
        for what, counts_B in (
            ("none", status_B == RewardStatus.NOT_APPLICABLE),
            ("failed", status_B >= RewardStatus.FAILED),
            ("timeout", status_B == RewardStatus.TIMED_OUT),
        ):
            numbers[f"reward/{name}/{what}_frac"] = counts_B.double().mean(), len(status_B)
        costs = [cost for cost in scores.extra.get(f"{name}/tokens", ()) if isinstance(cost, int | float)]
        if costs:
            numbers[f"reward/{name}/tokens"] = sum(costs), 1
    return numbers


def measure_sources(rollout: Rollout, scores: Scores, outcome_B: Tensor, threshold: float) -> Numbers:
    """Return the number of prompts, the reward and the accuracy of each source; empty without a mixture of sources. A
    completion is right if its `outcome_B` reaches `threshold`; NaN is left out."""
    numbers: Numbers = {}
    of_row = [prompt.source for prompt in rollout.row_prompts]
    for source in dict.fromkeys(filter(None, of_row)):
        own_B = torch.tensor([name == source for name in of_row])
        reward_N, right_N = (value_B[own_B & ~value_B.isnan()] for value_B in (scores.reward_B, outcome_B))
        numbers[f"source/{source}/count"] = sum(prompt.source == source for prompt in rollout.prompts), 1
        numbers[f"source/{source}/reward"] = reward_N.mean(), len(reward_N)
        numbers[f"source/{source}/accuracy"] = (right_N >= threshold).double().mean(), len(right_N)
    return numbers


def measure_turns(rollout: Rollout) -> Numbers:
    """Return the number of turns, and of the tokens between them; empty if the completions are not conversations."""
    talks = [completion for completion in rollout.completions if completion.messages]
    if not talks:
        return {}
    turns, given = [c.turns for c in talks], [sum(len(ids) for _, ids in c.observations) for c in talks]
    return {
        "turns/mean": (sum(turns) / len(talks), len(talks)),
        "turns/max": (max(turns), 1),
        "turns/given_tokens": (sum(given) / len(talks), len(talks)),
    }


def measure_lengths(stage: str, completions: list[Completion]) -> Numbers:
    """Return the mean length of completions in tokens, and the share that was cut at the length limit."""
    count = len(completions)
    return {
        f"{stage}/length_mean": (sum(len(c.token_ids) for c in completions) / max(count, 1), count),
        f"{stage}/clipped_frac": (sum(c.finish == "length" for c in completions) / max(count, 1), count),
    }


def measure_health(rollout: Rollout, scores: Scores) -> Numbers:
    """Return signs of reward hacking. Comparisons within groups leave out groups whose rewards are all equal."""
    shape = (len(rollout.prompts), rollout.num_generations)
    reward_PG = scores.reward_B.view(shape)
    shares = [repeated_share(completion.token_ids, _NGRAM) for completion in rollout.completions]
    repetition_B = torch.tensor(shares, dtype=torch.float64)
    numbers: Numbers = {"health/repetition_mean": (repetition_B.mean(), len(repetition_B))}
    for name, value_B in (("length", torch.tensor(rollout.lengths, dtype=torch.float64)), ("repetition", repetition_B)):
        correlation_P = group_correlation(reward_PG, value_B.view(shape))
        numbers[f"health/reward_{name}_corr"] = correlation_P.nanmean(), int((~correlation_P.isnan()).sum())
    highest_P1 = reward_PG.nan_to_num(-math.inf).amax(1, keepdim=True)
    best_PG = (reward_PG == highest_P1) & differ(reward_PG, ~reward_PG.isnan())[:, None]
    clipped_B = torch.tensor([completion.finish == "length" for completion in rollout.completions])
    clipped_N = clipped_B.view(shape)[best_PG].double()
    numbers["health/best_clipped_frac"] = clipped_N.mean(), len(clipped_N)
    return numbers


def group_correlation(reward_PG: Tensor, value_PG: Tensor) -> Tensor:
    """Return the Pearson correlation of rewards with another number within each group, float64 [P]. Completions whose
    reward is NaN are left out; the result is NaN if all rewards or all numbers of a group are equal."""
    one_PG, other_PG = (centered(number_PG.double(), ~reward_PG.isnan()) for number_PG in (reward_PG, value_PG))
    return (one_PG * other_PG).sum(1) / (one_PG.square().sum(1) * other_PG.square().sum(1)).sqrt()


def measure_parity(batch: TrainBatch, logp_bT: Tensor) -> Numbers:
    """Return the gap in log-probability between sampler and training forward pass, on the tokens of this step's
    policy, and in a mixture of experts how their routing differs."""
    if not batch.micro.rows:
        return {}
    own_bT = batch.own_bT if batch.is_old_bT is None else batch.own_bT & ~batch.is_old_bT
    gap_bT = torch.where(own_bT, (logp_bT.detach() - batch.sampler_logp_bT).abs(), 0.0)
    tokens = len(batch.micro.target_N) if batch.is_old_bT is None and not batch.writers else own_bT.sum()
    routes = find(batch.micro.sidecars, Replay)
    return {
        **(routes.numbers() if routes else {}),
        "parity/logp_abs_diff_mean": (gap_bT.sum() / tokens, tokens),
        "parity/logp_abs_diff_max": (gap_bT.max(), 1),
    }


def sampling_spans(start: float, engine: "Engine") -> list[Span]:
    """Return the stages of a rollout that began at `start` and ends now, from the durations that `engine` measured: the
    switch to generation and back, sampling, and the wait for other ranks."""
    end = time.perf_counter()
    wait = end - engine.wait_s
    generate, release = start + engine.gather_s, wait - engine.release_s
    edges = (start, generate, release, wait, end)
    return [*zip(("gather", "generate", "release", "wait"), edges[:-1], edges[1:], strict=True)]


def measure_sampling(rollout: Rollout, spans: Sequence[Span], captures: int | None) -> Numbers:
    """Return metrics of the sampling of a rollout: the number of sampled tokens, and times from its stages,
    `spans`. `captures` is the number of decode steps captured as CUDA graphs; None without a GPU."""
    sampled = sum(completion.new_tokens for completion in rollout.completions if not completion.writer)
    seconds = {name: end - begin for name, begin, end in spans}
    return {
        **({"time/straggler_s": (seconds["wait"], 1)} if world_size() > 1 else {}),
        "time/generate_s": (seconds["generate"] + seconds["wait"], 1), "time/gather_s": (seconds["gather"], 1),
        "time/switch_s": (seconds["gather"] + seconds["release"], 1), "completion/sampled_tokens": (sampled, 1),
        **({} if captures is None else {"throughput/graph_captures": (captures, 1)}),
    }  # fmt: skip


def measure_costs(rollout: Rollout, passes: int, policy: "Policy", meter: Meter) -> Numbers:
    """Return memory use and, from the meter's times, the speed and floating-point operations of sampling and of
    `passes` training passes over a rollout. If nothing was learned, the speed of training is left out."""
    rows = zip(rollout.row_prompts, rollout.completions, strict=True)
    tokens = sum(len(prompt.token_ids) + len(completion.token_ids) for prompt, completion in rows if completion.learned)
    generated = meter.total("completion/sampled_tokens") / meter.total("time/generate_s")
    numbers = measure_machine() | {"throughput/generated_tokens_per_s": (generated, 1)}
    if train_s := meter.total("time/train_s"):
        numbers["throughput/trained_tokens_per_s"] = tokens * passes / train_s, 1
    return numbers | measure_flops(rollout, passes, policy, meter)


def measure_machine() -> Numbers:
    """Return the GPU's peak memory since the last call and this process's current host memory, in GB, and which share
    of the machine's processors and of the GPU's time was in use (0 in the first step, as far as it can be known)."""
    numbers: Numbers = {
        "memory/rss_gb": (psutil.Process().memory_info().rss / 1e9, 1),
        "throughput/host_busy_frac": (psutil.cpu_percent() / 100, 1),
    }
    if torch.cuda.is_available():
        numbers["memory/peak_gb"] = torch.cuda.max_memory_allocated() / 1e9, 1
        torch.cuda.reset_peak_memory_stats()
        with suppress(ModuleNotFoundError, RuntimeError):  # it needs nvidia-ml-py and its driver
            numbers["throughput/gpu_busy_frac"] = torch.cuda.utilization() / 100, 1
    return numbers


def measure_flops(rollout: Rollout, passes: int, policy: "Policy", meter: Meter) -> Numbers:
    """Return the floating-point operations of a step on this rank, with `passes` training passes over the rollout, and
    the model FLOPs utilization if the device's peak is known. `meter` has the other metrics of the step."""
    generate, read_P, train_P = group_flops(rollout, policy.cost)
    read, train = float(read_P.sum()), float(train_P.sum())
    # Groups that dynamic sampling left out are assumed to be like those that it kept.
    kept = sum(len(completion.token_ids) for completion in rollout.completions if not completion.writer)
    generate *= meter.total("completion/sampled_tokens") / max(kept, 1)
    work = {"generate": generate}
    if meter.total("time/reference_s"):
        work["reference"] = read
    # Without a learning rate the policy did not learn: the step was skipped, or only a feature learned.
    if meter.total("policy/lr"):
        without = meter.mean("policy/no_gradient_frac")
        work["train"] = (train * (1 - without) + read * without) * passes
    numbers: Numbers = {f"flops/{stage}": (flops / _TERA, 1) for stage, flops in work.items()}
    device, peak = policy.engine.device, None
    if device.type == "cuda" and policy.config.dtype == "bfloat16":
        peak = peak_flops(torch.cuda.get_device_name(device))
    for stage in ("generate", "train"):
        if peak is not None and stage in work:
            numbers[f"throughput/mfu_{stage}"] = work[stage] / peak / meter.total(f"time/{stage}_s"), 1
    return numbers


def group_flops(rollout: Rollout, cost: Cost) -> tuple[float, Floats, Floats]:
    """Return the floating-point operations of sampling the policy's completions, and for each group, [P], those of one
    forward pass over the completions that are learned from, and of one training pass over the same completions.

    A prompt counts once for its group, even if training computes it once per completion. In a forward pass over whole
    sequences, attention counts at full length, as in PaLM, although causal attention needs only half of that. In
    decoding, only the tokens that are attended to count.
    """
    prompt_P = np.array([len(prompt.token_ids) for prompt in rollout.prompts], float)
    shape = len(rollout.prompts), rollout.num_generations
    sampled_PG = np.array(rollout.lengths, float).reshape(shape)
    given = [sum(len(ids) for _, ids in completion.observations) for completion in rollout.completions]
    read_PG = sampled_PG + np.array(given, float).reshape(shape)
    own_PG = np.array([not completion.writer for completion in rollout.completions]).reshape(shape)
    learned_PG = np.array([completion.learned for completion in rollout.completions]).reshape(shape)
    whole_PG = prompt_P[:, None] + read_PG
    prefill = cost.forward(prompt_P, prompt_P, 0) * own_PG.any(1)
    decode = cost.forward(read_PG, prompt_P[:, None] + (read_PG + 1) / 2, sampled_PG) * own_PG
    once_P, trained_P = (
        of(prompt_P, prompt_P, 0) * learned_PG.any(1) + (of(read_PG, whole_PG, sampled_PG) * learned_PG).sum(1)
        for of in (cost.forward, cost.training)
    )
    return float(prefill.sum() + decode.sum()), once_P, trained_P
