"""Settings of the objective, and which of them contradict each other."""

from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Lt
from pydantic import AfterValidator, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from hybrid_grpo.config import fields
from hybrid_grpo.config.about import MAY_CHANGE, About
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.presets import with_preset

LossType = Literal["dapo", "grpo", "dr_grpo"]
Baseline = Literal["mean", "leave_one_out", "length", "optimal", "best_other"]
Scale = Literal["group", "batch", "mean", "none"]
KlEstimator = Literal["k1", "k2", "k3"]
_FORM = About(rank=3)
"""Marks what gives the objective its form."""


def _tokens_or_share(value: float) -> float:
    if value < 0 or (value >= 1 and value != int(value)):
        raise ValueError(f"{value:g} must be a whole number of tokens, or a share below 1")
    return int(value) if value == int(value) else value


@dataclass(frozen=True, config=fields.SECTION)
class GrpoConfig:
    """The training objective."""

    about = About(rank=8)
    preset: fields.Text | None = None
    """A published objective by name, which sets fields of this section; fields given beside it win
    (docs/objectives.md): {presets}."""
    objective: Annotated[fields.Function | None, _FORM] = None
    """Your own loss, as `path/to/file.py:name`. Default: the built-in loss, which the other settings describe."""
    whole_groups: fields.Switch = False
    """Keep all completions of a group in one micro-batch, even if it becomes larger than policy.micro_batch_tokens, and
    tell `objective` each row's group, as `group_b`: for losses that compare completions."""
    loss_type: Annotated[LossType, About(usual=4), _FORM] = "dapo"
    """How token losses are averaged: over all tokens (dapo), within each completion and then over completions (grpo),
    or by dividing their sum by the constant B * max_completion_tokens (dr_grpo)."""
    importance: Annotated[Literal["token", "sequence", "product"], _FORM] = "token"
    """Whether the probability ratio of the policy to the policy that sampled belongs to a token, or to a completion: as
    the exponential of its tokens' mean log-ratio (GSPO, arXiv:2507.18071: `sequence` with loss_type grpo), or of their
    sum (`product`, as RLOO takes a completion for one action)."""
    surrogate: Annotated[Literal["clip", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "band", "ratio"], _FORM] = (
        "clip"
    )
    """How the ratio enters the loss. `clip`: through PPO's clipped surrogate. `cispo`: as a constant weight of the
    log-probability, at most 1 + epsilon_high, which keeps every token's gradient (CISPO, arXiv:2506.13585). `sapo`:
    through a soft gate (SAPO, arXiv:2511.20347). `gmpo`: as the geometric mean of the completion's clipped ratios
    (GMPO, arXiv:2507.20673). `dppo_tv`, `dppo_kl`: as it is, until the token's probability, or the KL of its
    probability against all others, has moved by epsilon in the direction of the advantage (DPPO, arXiv:2602.04879).
    `band`: as it is, within the bounds of `clip` and only there (Kimi K2.5, arXiv:2602.02276). `ratio`: as it is."""
    epsilon_low: Annotated[fields.Number, Gt(0), Lt(1), _FORM] = 0.2
    """The ratio is clipped from below at 1 - epsilon_low. Not used by cispo, which has no lower bound. With dppo_tv, by
    how much a probability may fall, with dppo_kl, up to which KL (nats), and with gmpo, a log-ratio."""
    epsilon_high: Annotated[fields.Positive, _FORM] = 0.2
    """The ratio is clipped from above at 1 + epsilon_high (DAPO: 0.28; GSPO: 4e-4, with epsilon_low 3e-4). With
    dppo_tv, by how much a probability may rise, with dppo_kl, up to which KL (nats), and with gmpo, a log-ratio."""
    tau_pos: fields.Positive = 1.0
    """How fast sapo's gate closes where the advantage is positive: larger is faster."""
    tau_neg: fields.Positive = 1.05
    """How fast sapo's gate closes where the advantage is negative."""
    dual_clip: Annotated[fields.Number, Gt(1)] | None = None
    """With a negative advantage A, the loss is at most -dual_clip * A, however large the ratio (arXiv:1912.09729; 3 is
    usual); only for surrogate clip."""
    off_policy_mask: fields.Positive | None = None
    """Leave out tokens of negative advantage in completions whose mean of log(old / policy) is above this many nats
    (DeepSeek-V3.2, arXiv:2512.02556, eq. 9)."""
    drift_coef: fields.NotNegative = 0.0
    """Weight of a penalty in the loss on the distance of the policy from the one that sampled."""
    drift: Literal["square", "absolute"] = "square"
    """What drift_coef weighs: the square of a token's log-ratio (Kimi K2.5, arXiv:2602.02276), or its absolute value
    (KL-Cov, arXiv:2505.22617)."""
    tokens: Literal["all", "top_entropy", "clip_cov", "kl_cov"] = "all"
    """Which tokens are learned from. `top_entropy`: the share tokens_share of highest entropy (arXiv:2506.01939).
    `clip_cov`: all but a share of those where advantage and log-probability vary together most (arXiv:2505.22617).
    `kl_cov`: all, and the penalty of drift_coef is only on such tokens."""
    tokens_share: fields.PositiveShare = 0.2
    """Share of the tokens that `tokens` is about (top_entropy: 0.2; clip_cov: 2e-4; kl_cov: 2e-3 or 2e-4)."""
    cov_low: fields.Number = 1.0
    """Lower bound of the covariance of tokens that clip_cov leaves out."""
    cov_high: fields.Number = 5.0
    """Upper bound of that covariance."""
    baseline: Annotated[Baseline, _FORM] = "mean"
    """What a reward is compared with: the mean of its group; the mean of the other rewards in it (RLOO,
    arXiv:2402.14740); the mean weighted by length (OPO, arXiv:2505.23585); the mean, at each token, weighted by what
    the tokens so far add to the gradient's variance (`optimal`, arXiv:2602.07078; one more forward); or, for the best
    reward alone, the best of the others (`best_other`: pass@k, arXiv:2503.19595)."""
    scale_rewards: Annotated[Scale, _FORM] = "group"
    """Divide the centered rewards by their standard deviation within the group, over all completions of the step
    (REINFORCE++-baseline, arXiv:2501.03262), by the group's mean (MaxRL, arXiv:2602.02710), or not at all."""
    combine_rewards: Literal["sum", "normalize"] = "sum"
    """How several rewards are added: with their weights as they are, or after each has been centered and scaled within
    the group (GDPO, arXiv:2601.05242, which is `normalize` with scale_rewards batch)."""
    step_credit: Literal["reward_to_go", "normalized"] = "reward_to_go"
    """How rewards of steps become advantages. `reward_to_go`: a token's advantage is what its completion still earns,
    relative to what the group's completions still earn at the same token. `normalized`: rewards of steps are normalized
    over all steps of the group, and a token's advantage is the sum over the steps to come (DeepSeekMath,
    arXiv:2402.03300, section 4.1.3), which favors ending before a step that may go wrong."""
    step_discount: fields.Share = 1.0
    """What the reward of the next step counts at a step; that of the one after it counts the square of this, and so on.
    0 gives each step its own reward only, which is right if that reward already says how much closer to a success the
    step has come (process advantages, arXiv:2410.08146)."""
    beta: Annotated[fields.NotNegative, About(usual=4, in_plan=4), _FORM] = 0.0
    """Weight of the KL divergence from the reference. If it is 0, no reference is loaded."""
    kl_estimator: KlEstimator = "k3"
    """Estimate of the KL at a token, with d = ref_logp - logp: -d (k1), d^2 / 2 (k2) or exp(d) - d - 1 (k3)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL is a term of the loss, or its sum over the completion is subtracted from the reward."""
    kl_unbiased: fields.Switch = False
    """Multiply each token's KL in the loss by the token's ratio, and differentiate both. With k1 and k3, the gradient
    is then that of the KL itself, even off-policy (DeepSeek-V3.2); otherwise, k1 in the loss is noise."""
    kl_target: fields.Positive | None = None
    """Adapt the weight of the KL, starting from beta, to hold policy/kl at this many nats per token (arXiv:1909.08593).
    A KL that is off by 20% or more changes the weight by a fifth over 10,000 completions."""
    entropy_coef: Annotated[fields.NotNegative, _FORM] = 0.0
    """Weight of the entropy bonus in the loss."""
    entropy_target: fields.Positive | None = None
    """Adapt entropy_coef after every step, to hold policy/entropy at this many nats: it grows by entropy_step while the
    entropy is at most this, and otherwise falls and is not used (Skywork-OR1, arXiv:2505.22312)."""
    entropy_step: fields.Positive = 0.005
    """By how much entropy_coef changes after a step, if entropy_target is set."""
    old_logp: Literal["auto", "sampler", "policy"] = "auto"
    """Source of the log-probabilities in the denominator of ratios, if a rollout has several optimizer steps: those
    that the sampler recorded, or a training forward pass before the first step. `auto` takes the sampler's, unless
    sampler_correction is on, rollout.logprobs is sampling, or the absolute drift is penalized; the ratio of the first
    step is then 1. `sampler`, if it is set, counts from the first step on."""
    sampler_correction: Literal["none", "truncate", "sequence", "mask", "band"] = "none"
    """Correct for a sampler that differs from the training forward pass. `truncate` weights every token's loss by the
    probability ratio of training to sampler, at most sampler_ratio_max (truncated importance sampling). `sequence` does
    so with the product of a completion's ratios. `mask` drops completions for which the geometric mean of that ratio is
    out of bounds. `band` weights tokens by the ratio, and drops those where it is out of bounds (IcePop)."""
    sampler_ratio_max: Annotated[fields.Number, Ge(1)] = 2.0
    """Upper bound of the ratio in sampler_correction."""
    sampler_ratio_min: fields.Share | None = None
    """Lower bound of that ratio. Default: 1 / sampler_ratio_max for `mask` and `band`, and none otherwise."""
    sampler_normalize: fields.Switch = False
    """Divide the weights of sampler_correction by their mean over the tokens of the optimizer step (self-normalized
    importance sampling; one more forward if a rollout has one optimizer step)."""
    mask_truncated: fields.Switch = False
    """Leave completions that were cut at the length limit out of the loss, but not out of the mean and standard
    deviation of their group (DAPO, section 3.4)."""
    overlong_buffer: Annotated[fields.Number, AfterValidator(_tokens_or_share)] = 0
    """Number of tokens before max_completion_tokens over which a length penalty grows from 0 to overlong_penalty (DAPO,
    equation 13), or, below 1, their share of max_completion_tokens; 0 means no penalty."""
    overlong_penalty: fields.Positive = 1.0
    """Penalty for a completion of max_completion_tokens tokens, if overlong_buffer is set."""
    dynamic_sampling: fields.Switch = False
    """Replace prompts whose completions have one reward, before any length penalty, with others (DAPO, equation 11)."""
    max_resamples: fields.Count = 5
    """Maximum number of dynamic_sampling rounds in one step; after that, the step continues with the prompts it has."""
    ref_every: fields.Whole = 0
    """Steps between refreshes of the reference from the policy; 0 keeps the initial model as the reference."""
    ref_mix: fields.PositiveShare = 1.0
    """Weight of the policy in a refreshed reference: 1 replaces the reference (iterative GRPO), and a small weight with
    ref_every 1 makes it a moving average. Below 1 it is averaged in float32, which takes 4 bytes of host memory for
    each weight of a bfloat16 model, sharded over the ranks."""
    num_iterations: Annotated[fields.Count, About(rank=2)] = 1
    """Number of passes over each rollout (mu in DeepSeekMath)."""
    num_minibatches: Annotated[fields.Count, About(rank=2)] = 1
    """Number of optimizer steps in each pass over a rollout."""
    balance: Annotated[Literal["auto", "off"], MAY_CHANGE] = "auto"
    """Which rank trains on a group. `off`: the rank that sampled it. `auto`: another rank where ranks would wait for
    each other because their completions differ in length. The loss is the same up to rounding."""

    @property
    def has_reference(self) -> bool:
        """Whether the run has a reference, from which the policy's KL is measured."""
        return self.beta > 0

    @property
    def averages_reference(self) -> bool:
        """Whether the reference is a moving average, which is float32 whatever the type of the weights."""
        return self.ref_every > 0 and self.ref_mix < 1

    @property
    def starts_on_policy(self) -> bool:
        """Whether the ratio of a rollout's first optimizer step is 1 by construction, since its own log-probabilities
        serve as `old_logp`; the sampler's do if the user has chosen them."""
        return self.old_logp != "sampler"

    @property
    def measures_old(self) -> bool:
        """Whether the first optimizer step needs more of the policy that sampled than `old_logp`."""
        return self.tokens == "top_entropy" or self.baseline == "optimal" or self.sampler_normalize

    def overlong_tokens(self, max_completion_tokens: int) -> int:
        buffer = self.overlong_buffer
        return round(buffer if buffer >= 1 else buffer * max_completion_tokens)

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, given: Any) -> Any:
        if isinstance(given, ArgsKwargs):
            by_place = dict(zip(cls.__dataclass_fields__, given.args, strict=False))
            return ArgsKwargs((), with_preset({**by_place, **(given.kwargs or {})}))
        return with_preset(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        of_tokens = self.surrogate in ("cispo", "gmpo", "dppo_tv", "dppo_kl")
        refuse(
            of_tokens and self.importance != "token",
            f"grpo.importance {self.importance} is not defined for grpo.surrogate {self.surrogate}, whose weights"
            " belong to tokens: set grpo.importance to token, or grpo.surrogate to clip (GSPO)",
        )
        refuse(
            self.importance == "product" and self.loss_type != "grpo",
            f"grpo.importance product gives each token the completion's ratio, which grpo.loss_type {self.loss_type}"
            " adds up instead of averaging: set grpo.loss_type to grpo",
        )
        refuse(
            self.tokens == "kl_cov" and self.drift_coef == 0,
            "grpo.tokens kl_cov chooses the tokens of a penalty without weight: set grpo.drift_coef, to 1 for example",
        )
        refuse(
            self.cov_low >= self.cov_high,
            f"grpo.cov_low {self.cov_low} is not below grpo.cov_high {self.cov_high}: set it lower",
        )
        for name in ("tokens", "baseline"):
            refuse(
                self.old_logp == "sampler" and getattr(self, name) in ("top_entropy", "optimal"),
                f"grpo.{name} {getattr(self, name)} needs a forward of the policy that sampled, and grpo.old_logp"
                " sampler leaves it out: set grpo.old_logp to auto",
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
        return self

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        refuse(
            self.kl_target is not None and not self.has_reference,
            f"grpo.kl_target {self.kl_target} multiplies grpo.beta, and 0 stays 0: set grpo.beta, to 0.01 for example",
        )
        refuse(
            self.kl_unbiased and self.kl_in == "reward",
            "grpo.kl_unbiased corrects a KL in the loss, and grpo.kl_in reward has none: set only one of them",
        )
        refuse(
            self.kl_unbiased and self.kl_estimator == "k2",
            "grpo.kl_unbiased cannot correct grpo.kl_estimator k2, whose mean is not the KL: set it to k3 or k1",
        )
        refuse(
            self.kl_estimator == "k1" and self.has_reference and self.kl_in == "loss" and not self.kl_unbiased,
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
    def _check_effect(self) -> Self:
        """Refuse settings that were changed but have no effect."""
        uncorrected, used = self.sampler_correction == "none", self.surrogate
        of_sampler = "sampler_ratio_max sampler_ratio_min sampler_normalize"
        no_clip, no_high = used != "clip", used in ("sapo", "ratio")
        clips_nothing = f"grpo.surrogate {used}, which clips no gradient: set grpo.surrogate to clip"
        no_reference = "grpo.beta 0, which loads no reference: set grpo.beta"
        unbounded = f"grpo.surrogate {used}, which has no lower bound: set grpo.surrogate to clip"
        steps, of_wholes = "step_credit step_discount", "which is not defined for rewards of steps: set that to"
        for names, idle, because in (
            ("kl_estimator kl_in kl_unbiased ref_every", not self.has_reference, no_reference),
            ("ref_mix", self.ref_every == 0, "grpo.ref_every 0: set grpo.ref_every"),
            ("whole_groups", self.objective is None, "the built-in loss, which compares none: set grpo.objective"),
            ("dual_clip", no_clip, f"grpo.surrogate {used}: set grpo.surrogate to clip"),
            ("epsilon_low", used == "cispo", unbounded),
            ("epsilon_low epsilon_high", no_high, clips_nothing),
            ("tau_pos tau_neg", used != "sapo", f"grpo.surrogate {used}: set grpo.surrogate to sapo"),
            ("drift", self.drift_coef == 0, "grpo.drift_coef 0: set that"),
            ("tokens_share", self.tokens == "all", "grpo.tokens all: set that to top_entropy, clip_cov or kl_cov"),
            ("cov_low cov_high", self.tokens != "clip_cov", f"grpo.tokens {self.tokens}: set that to clip_cov"),
            ("entropy_step", self.entropy_target is None, "grpo.entropy_target null: set that"),
            ("overlong_penalty", self.overlong_buffer == 0, "grpo.overlong_buffer 0: set that"),
            (of_sampler, uncorrected, "grpo.sampler_correction none: set that to truncate or mask"),
            (steps, self.combine_rewards == "normalize", f"grpo.combine_rewards normalize, {of_wholes} sum"),
            (steps, self.baseline == "best_other", f"grpo.baseline best_other, {of_wholes} mean"),
            ("max_resamples", not self.dynamic_sampling, "grpo.dynamic_sampling false: set that to true"),
        ):
            for name in names.split() if idle else ():
                value = getattr(self, name)
                shown = str(value).lower() if isinstance(value, bool) else value
                refuse(
                    value != type(self).__dataclass_fields__[name].default,
                    f"grpo.{name} {shown} has no effect with {because}, or remove grpo.{name}",
                )
        return self
