"""Settings of the objective, and which of them contradict each other."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import (
    SECTION,
    Count,
    Function,
    NotNegative,
    Number,
    Positive,
    PositiveShare,
    Switch,
    Whole,
)


@dataclass(frozen=True, config=SECTION)
class GrpoConfig:
    """The training objective."""

    objective: Function | None = None
    """Your own loss, as `path/to/file.py:name`. Default: the built-in loss, which the other settings describe."""
    loss_type: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """How token losses are averaged: over all tokens (dapo), within each completion and then over completions (grpo),
    or by dividing their sum by the constant B * max_completion_tokens (dr_grpo)."""
    importance: Literal["token", "sequence"] = "token"
    """Whether the probability ratio of the policy to the policy that sampled belongs to a token, or to a completion, as
    the exponential of its tokens' mean log-ratio (GSPO, arXiv:2507.18071: `sequence` with loss_type grpo)."""
    surrogate: Literal["clip", "cispo"] = "clip"
    """How the ratio enters the loss. `clip`: through PPO's clipped surrogate. `cispo`: as a constant weight of the
    log-probability, at most 1 + epsilon_high, which keeps every token's gradient (CISPO, arXiv:2506.13585)."""
    epsilon_low: Annotated[Number, Gt(0), Lt(1)] = 0.2
    """The ratio is clipped from below at 1 - epsilon_low. Not used by cispo, which has no lower bound."""
    epsilon_high: Positive = 0.2
    """The ratio is clipped from above at 1 + epsilon_high (DAPO: 0.28; GSPO: 4e-4, with epsilon_low 3e-4)."""
    dual_clip: Annotated[Number, Gt(1)] | None = None
    """With a negative advantage A, the loss is at most -dual_clip * A, however large the ratio (arXiv:1912.09729; 3 is
    usual); only for surrogate clip."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the mean of its group, or of the other rewards in it (RLOO, arXiv:2402.14740)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide the centered rewards by their standard deviation within the group, over all completions of the step
    (REINFORCE++-baseline, arXiv:2501.03262), or not at all (Dr. GRPO)."""
    combine_rewards: Literal["sum", "normalize"] = "sum"
    """How several rewards are added: with their weights as they are, or after each has been centered and scaled within
    the group (GDPO, arXiv:2601.05242, which is `normalize` with scale_rewards batch)."""
    step_credit: Literal["reward_to_go", "normalized"] = "reward_to_go"
    """How rewards of steps become advantages. `reward_to_go`: a token's advantage is what its completion still earns,
    relative to what the group's completions still earn at the same token. `normalized`: rewards of steps are normalized
    over all steps of the group, and a token's advantage is the sum over the steps to come (DeepSeekMath,
    arXiv:2402.03300, section 4.1.3), which favors ending before a step that may go wrong."""
    beta: NotNegative = 0.0
    """Weight of the KL divergence from the reference. If it is 0, no reference is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the KL at a token, with d = ref_logp - logp: -d (k1), d^2 / 2 (k2) or exp(d) - d - 1 (k3)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL is a term of the loss, or its sum over the completion is subtracted from the reward."""
    kl_unbiased: Switch = False
    """Multiply each token's KL in the loss by the token's ratio, and differentiate both. With k1 and k3, the gradient
    is then that of the KL itself, even off-policy (DeepSeek-V3.2); otherwise, k1 in the loss is noise."""
    kl_target: Positive | None = None
    """Adapt the weight of the KL, starting from beta, to hold policy/kl at this many nats per token (arXiv:1909.08593).
    A KL that is off by 20% or more changes the weight by a fifth over 10,000 completions."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus in the loss."""
    old_logp: Literal["auto", "sampler", "policy"] = "auto"
    """Source of the log-probabilities in the denominator of ratios, if a rollout has several optimizer steps: those
    that the sampler recorded, or a training forward pass before the first step. `auto` takes the sampler's, unless
    sampler_correction is on or rollout.logprobs is sampling."""
    sampler_correction: Literal["none", "truncate", "mask"] = "none"
    """Correct for a sampler that differs from the training forward pass. `truncate` weights every token's loss by the
    probability ratio of training to sampler, at most sampler_ratio_max (truncated importance sampling). `mask` drops
    completions for which the geometric mean of that ratio is out of bounds."""
    sampler_ratio_max: Annotated[Number, Ge(1)] = 2.0
    """Upper bound of the ratio in sampler_correction; its reciprocal is the lower bound for `mask`."""
    mask_truncated: Switch = False
    """Leave completions that were cut at the length limit out of the loss, but not out of the mean and standard
    deviation of their group (DAPO, section 3.4)."""
    overlong_buffer: Whole = 0
    """Number of tokens before max_completion_tokens over which a length penalty grows from 0 to overlong_penalty (DAPO,
    equation 13); 0 means no penalty."""
    overlong_penalty: Positive = 1.0
    """Penalty for a completion of max_completion_tokens tokens, if overlong_buffer is set."""
    dynamic_sampling: Switch = False
    """Replace prompts whose completions all have the same reward, before any length penalty, with other prompts (DAPO,
    equation 11)."""
    max_resamples: Count = 5
    """Maximum number of dynamic_sampling rounds in one step; after that, the step continues with the prompts it has."""
    ref_every: Whole = 0
    """Steps between refreshes of the reference from the policy; 0 keeps the initial model as the reference."""
    ref_mix: PositiveShare = 1.0
    """Weight of the policy in a refreshed reference: 1 replaces the reference (iterative GRPO), and a small weight with
    ref_every 1 makes it a moving average."""
    num_iterations: Count = 1
    """Number of passes over each rollout (mu in DeepSeekMath)."""
    num_minibatches: Count = 1
    """Number of optimizer steps in each pass over a rollout."""
    balance: Literal["auto", "off"] = "auto"
    """Which rank trains on a group. `off`: the rank that sampled it. `auto`: another rank where ranks would wait for
    each other because their completions differ in length. The loss is the same up to rounding."""

    @model_validator(mode="after")
    def _check_contradictions(self) -> GrpoConfig:
        refuse(
            self.surrogate == "cispo" and self.importance == "sequence",
            "grpo.importance sequence is not defined for grpo.surrogate cispo, whose weights belong to tokens: set"
            " grpo.importance to token (CISPO), or grpo.surrogate to clip (GSPO)",
        )
        refuse(
            self.baseline == "leave_one_out" and self.scale_rewards == "batch",
            "grpo.baseline leave_one_out multiplies all advantages by one number, which grpo.scale_rewards batch"
            " divides out again: set grpo.baseline to mean, or grpo.scale_rewards to none (RLOO)",
        )
        refuse(
            self.combine_rewards == "normalize" and self.scale_rewards == "group",
            "grpo.combine_rewards normalize and grpo.scale_rewards group divide by the deviation of the group twice:"
            " set grpo.scale_rewards to batch (GDPO) or none",
        )
        refuse(
            self.kl_target is not None and self.beta == 0,
            f"grpo.kl_target {self.kl_target} multiplies grpo.beta, and 0 stays 0: set grpo.beta to what it starts"
            " from, such as 0.01",
        )
        refuse(
            self.kl_unbiased and self.kl_in == "reward",
            "grpo.kl_unbiased corrects a KL in the loss, and grpo.kl_in reward has no gradient to correct: set one of"
            " them back to its default",
        )
        refuse(
            self.kl_unbiased and self.kl_estimator == "k2",
            "grpo.kl_unbiased cannot correct grpo.kl_estimator k2, whose mean is not the KL: set it to k3 or k1",
        )
        refuse(
            self.kl_estimator == "k1" and self.beta > 0 and self.kl_in == "loss" and not self.kl_unbiased,
            "grpo.kl_estimator k1 in the loss has a gradient of mean 0: set grpo.kl_unbiased to true, grpo.kl_in to"
            " reward, or grpo.kl_estimator to k3",
        )
        refuse(
            self.old_logp == "sampler" and self.sampler_correction != "none",
            f"grpo.sampler_correction {self.sampler_correction} compares the sampler with the training forward, and"
            " grpo.old_logp sampler leaves out the latter: set grpo.old_logp to auto",
        )
        return self

    @model_validator(mode="after")
    def _check_effect(self) -> GrpoConfig:
        """Refuse settings that were changed but have no effect."""
        cispo, uncorrected = self.surrogate == "cispo", self.sampler_correction == "none"
        no_reference = "grpo.beta 0, which loads no reference: set grpo.beta"
        for names, idle, because in (
            ("kl_estimator kl_in kl_unbiased ref_every", self.beta == 0, no_reference),
            ("ref_mix", self.ref_every == 0, "grpo.ref_every 0: set grpo.ref_every"),
            ("dual_clip", cispo, "grpo.surrogate cispo, which clips no gradient: set grpo.surrogate to clip"),
            ("epsilon_low", cispo, "grpo.surrogate cispo, which has no lower bound: set grpo.surrogate to clip"),
            ("overlong_penalty", self.overlong_buffer == 0, "grpo.overlong_buffer 0: set that"),
            ("sampler_ratio_max", uncorrected, "grpo.sampler_correction none: set that to truncate or mask"),
            ("max_resamples", not self.dynamic_sampling, "grpo.dynamic_sampling false: set that to true"),
        ):
            for name in names.split() if idle else ():
                value = getattr(self, name)
                shown = str(value).lower() if isinstance(value, bool) else value
                refuse(
                    value != type(self).__dataclass_fields__[name].default,
                    f"grpo.{name} {shown} has no effect with {because}, or take grpo.{name} out",
                )
        return self
