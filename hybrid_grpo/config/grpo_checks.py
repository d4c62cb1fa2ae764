"""Objectives that mean nothing: refused in one line that names the settings and the way out. Without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hybrid_grpo.config import GrpoConfig, TrainConfig
from hybrid_grpo.config.errors import refuse


class _Idle(NamedTuple):
    """Settings that change nothing while something else is so."""

    settings: tuple[str, ...]
    when: Callable[[GrpoConfig], bool]
    because: str


_IDLE = (
    _Idle(
        ("kl_estimator", "kl_in", "kl_unbiased", "ref_every"),
        lambda grpo: grpo.beta == 0,
        "grpo.beta 0, which loads no reference: set grpo.beta",
    ),
    _Idle(("kl_horizon",), lambda grpo: grpo.kl_target is None, "a fixed grpo.beta: set grpo.kl_target"),
    _Idle(("ref_mix",), lambda grpo: grpo.ref_every == 0, "grpo.ref_every 0: set grpo.ref_every"),
    _Idle(
        ("dual_clip",),
        lambda grpo: grpo.surrogate == "cispo",
        "grpo.surrogate cispo, which clips no gradient: set grpo.surrogate to clip",
    ),
    _Idle(
        ("epsilon_low",),
        lambda grpo: grpo.surrogate == "cispo",
        "grpo.surrogate cispo, which has no lower bound: set grpo.surrogate to clip",
    ),
    _Idle(("overlong_penalty",), lambda grpo: grpo.overlong_buffer == 0, "grpo.overlong_buffer 0: set that"),
    _Idle(
        ("sampler_ratio_max",),
        lambda grpo: grpo.sampler_correction == "none",
        "grpo.sampler_correction none: set that to truncate or mask",
    ),
    _Idle(
        ("sampler_ratio_min",),
        lambda grpo: grpo.sampler_correction != "mask",
        "grpo.sampler_correction other than mask: set that to mask",
    ),
    _Idle(
        ("max_resamples",),
        lambda grpo: not grpo.dynamic_sampling,
        "grpo.dynamic_sampling false: set that to true",
    ),
)


class _Contradiction(NamedTuple):
    """Settings that do not go together."""

    when: Callable[[TrainConfig], bool]
    says: str
    """With the fields of `grpo` and `rollout` in braces."""


_CONTRADICTIONS = (
    _Contradiction(
        lambda c: c.grpo.epsilon_low >= 1,
        "grpo.epsilon_low {grpo.epsilon_low} must be below 1: the ratio stays positive",
    ),
    _Contradiction(
        lambda c: c.grpo.dual_clip is not None and c.grpo.dual_clip <= 1,
        "grpo.dual_clip {grpo.dual_clip} must be greater than 1: it bounds ratios above it, 3 is usual",
    ),
    _Contradiction(
        lambda c: c.grpo.importance == "sequence" and c.grpo.surrogate == "cispo",
        "grpo.importance sequence is not defined for grpo.surrogate cispo, whose weights are of tokens: set"
        " grpo.importance to token (CISPO), or grpo.surrogate to clip (GSPO)",
    ),
    _Contradiction(
        lambda c: c.grpo.baseline == "leave_one_out" and c.grpo.scale_rewards == "batch",
        "grpo.baseline leave_one_out multiplies all advantages by one number, which grpo.scale_rewards batch divides"
        " out again: set grpo.baseline to mean, or grpo.scale_rewards to none (RLOO)",
    ),
    _Contradiction(
        lambda c: c.grpo.combine_rewards == "normalize" and len(c.rewards) < 2,
        "grpo.combine_rewards normalize weighs rewards against each other, and rewards has one: set"
        " grpo.combine_rewards to sum",
    ),
    _Contradiction(
        lambda c: c.grpo.combine_rewards == "normalize" and c.grpo.scale_rewards == "group",
        "grpo.combine_rewards normalize and grpo.scale_rewards group divide by the deviation of the group twice: set"
        " grpo.scale_rewards to batch (GDPO) or none",
    ),
    _Contradiction(
        lambda c: c.grpo.kl_target is not None and c.grpo.kl_target <= 0,
        "grpo.kl_target {grpo.kl_target} must be greater than 0",
    ),
    _Contradiction(
        lambda c: c.grpo.kl_target is not None and c.grpo.beta == 0,
        "grpo.kl_target {grpo.kl_target} multiplies grpo.beta, and 0 stays 0: set grpo.beta to what it starts from,"
        " such as 0.01",
    ),
    _Contradiction(
        lambda c: c.grpo.kl_unbiased and c.grpo.kl_in == "reward",
        "grpo.kl_unbiased is of a KL in the loss, and grpo.kl_in reward has no gradient to correct: set one of them"
        " back",
    ),
    _Contradiction(
        lambda c: c.grpo.kl_unbiased and c.grpo.kl_estimator == "k2",
        "grpo.kl_unbiased cannot make up for grpo.kl_estimator k2, whose mean is not the KL: set it to k3 or k1",
    ),
    _Contradiction(
        lambda c: c.grpo.kl_estimator == "k1" and c.grpo.kl_in == "loss" and not c.grpo.kl_unbiased,
        "grpo.kl_estimator k1 in the loss has a gradient of mean 0: set grpo.kl_unbiased to true, grpo.kl_in to"
        " reward, or grpo.kl_estimator to k3",
    ),
    _Contradiction(
        lambda c: c.grpo.old_logp == "sampler" and c.grpo.sampler_correction != "none",
        "grpo.sampler_correction {grpo.sampler_correction} compares the sampler with the training forward, and with"
        " grpo.old_logp sampler there is one of them: set grpo.old_logp to auto",
    ),
    _Contradiction(
        lambda c: not 0 < c.grpo.sampler_ratio_min <= 1 <= c.grpo.sampler_ratio_max,
        "grpo.sampler_ratio_min {grpo.sampler_ratio_min} and grpo.sampler_ratio_max {grpo.sampler_ratio_max}: set them"
        " to 0 < min <= 1 <= max, since at 1 the sampler is the policy",
    ),
    _Contradiction(
        lambda c: c.grpo.mask_truncated and c.rollout.ignore_eos,
        "grpo.mask_truncated leaves nothing to learn from where rollout.ignore_eos cuts every completion: set one of"
        " them to false",
    ),
    _Contradiction(
        lambda c: c.grpo.overlong_buffer >= c.rollout.max_completion_tokens,
        "grpo.overlong_buffer {grpo.overlong_buffer} punishes every completion: set it below"
        " rollout.max_completion_tokens {rollout.max_completion_tokens}",
    ),
    _Contradiction(
        lambda c: not 0 < c.grpo.ref_mix <= 1,
        "grpo.ref_mix {grpo.ref_mix} must be in (0, 1]: it is the share of the policy in a refreshed reference",
    ),
)


def check_grpo(config: TrainConfig) -> None:
    """Refuse an objective that contradicts itself, or a setting of it that has no effect.

    Raises:
        UserError: one line that names the settings and the way out.
    """
    for contradiction in _CONTRADICTIONS:
        refuse(contradiction.when(config), contradiction.says.format(grpo=config.grpo, rollout=config.rollout))
    default = GrpoConfig()
    for idle in _IDLE:
        for name in idle.settings:
            value = getattr(config.grpo, name)
            refuse(
                idle.when(config.grpo) and value != getattr(default, name),
                f"grpo.{name} {_spelled(value)} has no effect with {idle.because}, or take grpo.{name} out",
            )


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
