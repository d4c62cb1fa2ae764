"""The configuration of training: its sections, and the checks that these agree with each other."""

from dataclasses import field
from typing import Self, TypeVar

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.alarms import AlarmsConfig, GuardConfig
from hybrid_grpo.config.data import DataConfig
from hybrid_grpo.config.errors import did_you_mean, refuse
from hybrid_grpo.config.evaluation import EvalConfig
from hybrid_grpo.config.features import FeatureConfig, FeatureList, registered, with_feature_sections
from hybrid_grpo.config.fields import SECTION
from hybrid_grpo.config.grpo import GrpoConfig
from hybrid_grpo.config.model import EngineConfig, LoraConfig, PolicyConfig
from hybrid_grpo.config.rewards import RewardConfig, RewardList, ScoringConfig, reward_name
from hybrid_grpo.config.rollout import RolloutConfig, environment_rewards
from hybrid_grpo.config.run import CheckpointConfig, LogConfig, RunConfig

FeatureConfigT = TypeVar("FeatureConfigT", bound=FeatureConfig)
_LEAST_BF16_LR = 4e-5
"""Learning rate below which most updates of bfloat16 weights round to nothing: Adam moves a weight by about the
learning rate, weights are about 0.02, and a number with 8 bits loses a change of less than 2^-9 of it."""


@dataclass(frozen=True, config=SECTION)
class ModelRunConfig:
    """The sections that all training commands have."""

    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)

    command = ""

    @property
    def needs_whole(self) -> bool:
        """Whether every rank has to have the whole weights."""
        return self.lora.load_in_4bit

    @property
    def feature_configs(self) -> list[FeatureConfig]:
        """The sections of features, whether they are on or off; `sft` has none."""
        return [getattr(self, name) for name in registered() if hasattr(self, name)]

    @property
    def active_features(self) -> list[FeatureConfig]:
        """The sections of the features that are on."""
        return [section for section in self.feature_configs if section.is_on]

    def of(self, kind: type[FeatureConfigT]) -> FeatureConfigT:
        """Return the section of a feature, given the section's class."""
        section: FeatureConfigT = getattr(self, kind.section)
        return section

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        refuse(
            self.policy.dtype == "bfloat16" and self.engine.zero_stage == 0,
            "policy.dtype bfloat16 needs engine.zero_stage 1 or higher (at stage 0 DeepSpeed keeps no float32 weights):"
            " set engine.zero_stage to 1, or policy.dtype to float32",
        )
        rounds = self.engine.deepspeed.get("bf16", {}).get("bf16_master_weights_and_grads", False)
        refuse(
            rounds and self.policy.lr < _LEAST_BF16_LR,
            f"engine.deepspeed.bf16.bf16_master_weights_and_grads keeps no float32 weights, and at policy.lr"
            f" {self.policy.lr:g} most updates would round to nothing in bfloat16: remove it, or set policy.lr to"
            f" {_LEAST_BF16_LR:g} or more",
        )
        last = max(self.log.profiled, default=0)
        refuse(
            last > self.run.steps,
            f"log.profile {last} is after the last step, run.steps {self.run.steps}: name an earlier one",
        )
        return self


@dataclass(frozen=True, config=SECTION)
@with_feature_sections
class TrainConfig(ModelRunConfig):
    """GRPO training. Registered features add their sections (see config/features.py)."""

    command = "train"
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    rewards: RewardList = field(default_factory=list)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    features: FeatureList = field(default_factory=list)

    @property
    def needs_whole(self) -> bool:
        return self.lora.load_in_4bit or self.rollout.weights == "unmerged"

    @property
    def needs_weights(self) -> bool:
        return True

    @property
    def off_policy_rows(self) -> int:
        """Completions of each group that features supply instead of the policy."""
        return sum(feature.rows_per_group for feature in self.active_features)

    @property
    def off_policy_source(self) -> str:
        """The section of the feature that supplies completions; empty if the policy samples them all."""
        return next((feature.section for feature in self.active_features if feature.rows_per_group), "")

    @property
    def recomputes_old_logp(self) -> bool:
        """Whether `old_logp`, the denominator of ratios, comes from a training forward pass, not the sampler."""
        grpo = self.grpo
        auto = self.rollout.logprobs == "sampling" or grpo.sampler_correction != "none" or grpo.measures_old
        # The sign of a log-ratio is that of the sampler's rounding where the policy has not moved yet.
        auto = auto or (grpo.drift_coef > 0 and grpo.drift == "absolute")
        return auto if grpo.old_logp == "auto" else grpo.old_logp == "policy"

    def idle_bounds(self, optimizer_steps: int) -> list[str]:
        """Return the bounds of the ratio that were changed without effect, because the ratio is 1: every rollout has a
        single optimizer step, no feature adds completions, `old_logp` is the policy's own, and no completion has tokens
        of an older policy."""
        default = GrpoConfig()
        bounds = ("epsilon_low", "epsilon_high", "dual_clip", "tau_pos", "tau_neg", "off_policy_mask", "drift_coef")
        changed = [f"grpo.{name}" for name in bounds if getattr(self.grpo, name) != getattr(default, name)]
        others = self.rollout.carry or any(feature.rows_per_group for feature in self.active_features)
        return changed if optimizer_steps == 1 and self.grpo.starts_on_policy and not others else []

    @property
    def reward_names(self) -> list[str]:
        return names_of_rewards(self.rewards, self.rollout)

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of every reward, by name; an environment's reward has weight 1."""
        return dict.fromkeys(self.reward_names, 1.0) | {reward_name(reward): reward.weight for reward in self.rewards}

    @model_validator(mode="after")
    def _check_training(self) -> Self:
        self._check_groups()
        for section in self.feature_configs:
            section.check(self)
        self._check_alone()
        self._check_carry()
        self._check_split_rows()
        _check_objective(self.grpo, self.rollout, self.lora, self.reward_names)
        _check_weights(self.rollout, self.lora)
        check_outcome(self.eval, self.reward_names)
        self._check_sources()
        if self.data.eval_path is None and self.data.eval_split is None:
            every = 0 if self.eval.sets else self.eval.every
            for setting, value in (("eval.every", every), ("data.eval_limit", self.data.eval_limit)):
                refuse(bool(value), f"{setting} {value} needs held-out prompts: set data.eval_path or data.eval_split")
        return self

    def _check_groups(self) -> None:
        ways = [f"or a {section.section}" for section in self.feature_configs if section.teaches != "nothing"]
        refuse(
            self.rollout.num_generations < 2 and all(of.teaches == "nothing" for of in self.active_features),
            f"rollout.num_generations {self.rollout.num_generations} makes no group: advantages need"
            f" {', '.join(['2 or more', *ways])}",
        )

    def _check_split_rows(self) -> None:
        """Refuse what the training pass needs of whole rows, if several ranks compute each."""
        ranks, attention = self.engine.sequence_parallel, self.policy.attn_implementation
        for setting, value, whole in (
            ("rollout.logprobs", self.rollout.logprobs, self.rollout.logprobs == "mask"),
            ("grpo.baseline", self.grpo.baseline, self.grpo.baseline == "optimal"),
            ("policy.attn_implementation", attention, attention not in ("auto", "packed")),
            ("policy.routing", self.policy.routing, self.policy.routing == "replay"),
        ):
            refuse(
                ranks > 1 and whole,
                f"{setting} {value} needs whole rows, of which engine.sequence_parallel {ranks} gives each rank a part:"
                " remove one of them",
            )

    def _check_carry(self) -> None:
        carry = self.rollout.carry
        for is_set, what in (
            (self.grpo.dynamic_sampling, "grpo.dynamic_sampling compares all of them before it replaces some"),
            (
                bool(self.off_policy_source),
                f"{self.off_policy_source} writes completions for prompts that are begun in the same step",
            ),
        ):
            refuse(
                is_set and bool(carry),
                f"rollout.carry {carry:g} leaves groups open after a step, and {what}: remove one of them",
            )

    def _check_alone(self) -> None:
        """Refuse settings about groups if each group is a single completion."""
        if self.rollout.num_generations > 1:
            return
        compares = ("baseline", "scale_rewards", "combine_rewards", "step_credit", "step_discount")
        for name in (*compares, "overlong_buffer", "kl_in", "dynamic_sampling"):
            value, default = getattr(self.grpo, name), GrpoConfig.__dataclass_fields__[name].default
            refuse(
                value != default,
                f"grpo.{name} {str(value).lower()} is about rewards in a group, and rollout.num_generations 1 makes"
                f" none: set rollout.num_generations to 2 or more, or remove grpo.{name}",
            )

    def _check_sources(self) -> None:
        """Refuse functions for a source that the mixture lacks, and a source from which nothing would be learned."""
        known = self.data.source_names
        for reward, source in [(entry, source) for entry in self.rewards for source in entry.sources]:
            refuse(
                source not in known,
                f"rewards: {reward_name(reward)} is for source {source}, which data.mixture does not have:"
                f" {did_you_mean(source, known)}",
            )
        taught = self.features or any(feature.teaches != "nothing" for feature in self.active_features)
        if not self.rewards or taught or environment_rewards(self.rollout):
            return
        for source in known:
            refuse(
                all(reward.sources and source not in reward.sources for reward in self.rewards),
                f"rewards: no function is for source {source} of data.mixture, whose completions would all have reward"
                f" 0: add {source} to the `sources` of one, or remove it from data.mixture",
            )


def names_of_rewards(rewards: list[RewardConfig], rollout: RolloutConfig) -> list[str]:
    """Names of all rewards: first the functions', then the environments'."""
    return [*map(reward_name, rewards), *dict.fromkeys(environment_rewards(rollout).values())]


def check_outcome(evaluation: EvalConfig, names: list[str]) -> None:
    """Raise UserError if the outcome is not one of the rewards, or if two rewards have the same name."""
    twice = next((name for name in names if names.count(name) > 1), None)
    refuse(twice is not None, f"rewards: {twice} is also the name of an environment's reward: set `name` on one")
    outcome = evaluation.outcome
    refuse(
        outcome is not None and outcome not in names,
        f"eval.outcome {outcome!r} is not a reward of this run: {did_you_mean(outcome or '', names)}",
    )


def _check_weights(rollout: RolloutConfig, lora: LoraConfig) -> None:
    refuse(
        rollout.weights == "unmerged" and not lora.rank,
        "rollout.weights unmerged samples with adapters, and without lora.rank there are none: set it, or remove this",
    )
    refuse(
        rollout.weights == "int8" and lora.load_in_4bit,
        "rollout.weights int8 copies weights that lora.load_in_4bit has in four bits: set it to unmerged",
    )


def _check_objective(grpo: GrpoConfig, rollout: RolloutConfig, lora: LoraConfig, rewards: list[str]) -> None:
    refuse(
        rollout.temperature == 0,
        "rollout.temperature 0 samples the same completion for a whole group: give a value above 0",
    )
    refuse(
        lora.rank > 0 and grpo.ref_every > 0,
        f"grpo.ref_every {grpo.ref_every} refreshes the reference, which with lora.rank is the model without"
        " adapters: remove one of them",
    )
    refuse(
        grpo.combine_rewards == "normalize" and len(rewards) == 1,
        "grpo.combine_rewards normalize weighs several rewards: set grpo.combine_rewards to sum",
    )
    refuse(
        grpo.mask_truncated and rollout.ignore_eos,
        "grpo.mask_truncated leaves nothing if rollout.ignore_eos cuts every completion: set one of them to false",
    )
    refuse(
        grpo.baseline == "optimal" and rollout.logprobs == "mask",
        "grpo.baseline optimal looks at the whole distribution, and rollout.logprobs mask at what filters left of it:"
        " set rollout.logprobs to softmax",
    )
    refuse(
        grpo.overlong_buffer >= rollout.max_completion_tokens,
        f"grpo.overlong_buffer {grpo.overlong_buffer} punishes every completion: set it below"
        f" rollout.max_completion_tokens {rollout.max_completion_tokens}",
    )
