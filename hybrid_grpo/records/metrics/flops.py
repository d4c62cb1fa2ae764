"""Counts the floating-point operations of a step's stages, and computes the share of the device's peak they reach."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from hybrid_grpo.data.batch import Numbers, Rollout
from hybrid_grpo.distributed.hardware import peak_flops
from hybrid_grpo.model.flops import Cost, Floats
from hybrid_grpo.records.metrics.meter import Meter

if TYPE_CHECKING:
    from hybrid_grpo.policy import Policy

_TERA = 1e12


def measure_flops(rollout: Rollout, passes: int, policy: Policy, meter: Meter) -> Numbers:
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
    peak = _peak(policy.engine.device) if policy.config.dtype == "bfloat16" else None
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
    given = [sum(len(ids) for _, ids in completion.given) for completion in rollout.completions]
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


@functools.cache
def _peak(device: torch.device) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
