"""Settings of the critic: the value model of PPO, its optimizer and engine, and the advantages from its values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Le
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.about import MAY_CHANGE, About
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.features import FeatureConfig
from hybrid_grpo.config.fields import SECTION, NotNegative, Place, Positive, PositiveShare, Share, Switch, Whole
from hybrid_grpo.config.grpo import GrpoConfig
from hybrid_grpo.config.model import OF_SHARDS, EngineConfig, PolicyConfig

if TYPE_CHECKING:
    from hybrid_grpo.config.train import TrainConfig

_OF_POLICY = (
    *("dtype", "attn_implementation", "shared_prefix", "gradient_checkpointing", "lr_schedule", "weight_decay"),
    *("betas", "max_grad_norm", "micro_batch_tokens", "pickled_weights"),
)
"""Settings that the critic takes from the policy."""


@dataclass(frozen=True, config=SECTION)
class CriticConfig(FeatureConfig):
    """A critic, trained with the policy but in its own DeepSpeed engine (PPO). Advantages are relative to the critic's
    values instead of the group. Everything that is not set here, such as the type of the weights, is as in the sections
    policy and engine. The critic has no adapters."""

    enabled: Switch = False
    """Train a critic. All other settings of this section require this one."""
    model: Place | None = None
    """Folder or hub name of the initial model: a reward model, or a causal language model, whose value head starts at
    0. It must have the policy's tokenizer. Default: policy.model."""
    lr: Positive = 1e-5
    """Peak learning rate. The schedule is the policy's lr_schedule, without warm-up."""
    warmup_steps: Whole = 0
    """Steps at the beginning of the run in which only the critic learns."""
    gamma: PositiveShare = 1.0
    """Discount of rewards, per token."""
    lam: Share = 1.0
    """Lambda of generalized advantage estimation (arXiv:1506.02438). With 1, the advantage of a token counts everything
    that its completion still earns. Below 1, the critic's values replace rewards that are far away: 0.95 looks
    about 20 tokens ahead."""
    clip: NotNegative = 0.2
    """A value that has moved further than this since the beginning of the step gets no gradient that would move it
    even further (PPO's clipped value loss). In units of the reward; 0 does not clip."""
    whiten: Switch = True
    """Normalize the advantages of all tokens of a step, over all ranks, to mean 0 and standard deviation 1."""
    zero_stage: Annotated[Annotated[Whole, Le(3)] | None, MAY_CHANGE] = None
    """ZeRO stage of the critic. Default: engine.zero_stage."""
    offload_optimizer: Annotated[Switch | None, MAY_CHANGE] = None
    """Keep the critic's optimizer state in host memory. Default: engine.offload_optimizer."""

    section, method = "critic", "PPO"
    about = About(rank=7)
    feature = "critic:CriticFeature"
    page = "docs/ppo.md"
    replaces_groups = "critic.enabled"
    sees = False

    @property
    def is_on(self) -> bool:
        return self.enabled

    @property
    def policy_waits(self) -> int:
        return self.warmup_steps

    @property
    def models(self) -> dict[str, str | None]:
        return {"critic.model": self.model}

    def as_policy(self, policy: PolicyConfig) -> PolicyConfig:
        """Return the settings of the critic's model and optimizer, given the policy's settings."""
        shared = {name: getattr(policy, name) for name in _OF_POLICY}
        return PolicyConfig(model=self.model or policy.model, lr=self.lr, **shared)

    def as_engine(self, engine: EngineConfig) -> EngineConfig:
        """Return the settings of the critic's engine, given the policy's engine settings."""
        stage, offload = self._stage_and_offload(engine)
        return replace(engine, zero_stage=stage, offload_optimizer=offload)

    def _stage_and_offload(self, engine: EngineConfig) -> tuple[int | None, bool]:
        stage = engine.zero_stage if self.zero_stage is None else self.zero_stage
        return stage, engine.offload_optimizer if self.offload_optimizer is None else self.offload_optimizer

    def check(self, config: TrainConfig) -> None:
        if not self.enabled:
            self.refuse_idle("without critic.enabled: set critic.enabled to true")
            return
        self._check_engine(config.policy, config.engine)
        grpo = config.grpo
        for name in ("baseline", "scale_rewards", "combine_rewards", "step_credit", "step_discount"):
            value = getattr(grpo, name)
            refuse(
                value != GrpoConfig.__dataclass_fields__[name].default,
                f"grpo.{name} {value} has no effect with critic.enabled, which compares nothing within groups: set"
                f" critic.enabled to false, or remove grpo.{name}",
            )
        refuse(
            grpo.dynamic_sampling and config.rollout.num_generations < 2,
            "grpo.dynamic_sampling replaces groups of equal rewards, which all groups of rollout.num_generations 1 are:"
            " set grpo.dynamic_sampling to false, or rollout.num_generations to 2 or more",
        )
        refuse(
            self.warmup_steps >= config.run.steps,
            f"critic.warmup_steps {self.warmup_steps} leaves the policy none of run.steps {config.run.steps}: lower it",
        )
        refuse(
            bool(config.off_policy_source),
            f"critic.enabled learns the values of the policy's own completions, and {config.off_policy_source} brings"
            f" others: set critic.enabled to false, or remove {config.off_policy_source}",
        )

    def _check_engine(self, policy: PolicyConfig, engine: EngineConfig) -> None:
        stage, offload = self._stage_and_offload(engine)
        refuse(
            policy.dtype == "bfloat16" and stage == 0,
            "policy.dtype bfloat16 needs critic.zero_stage 1 or higher: set critic.zero_stage to 1, or policy.dtype to"
            " float32",
        )
        refuse(
            offload and stage == 0,
            "critic.offload_optimizer needs critic.zero_stage 1 or higher: set critic.zero_stage to 1, 2 or 3, or"
            " critic.offload_optimizer to false",
        )
        sharded = [name for name in OF_SHARDS if name in engine.deepspeed.get("zero_optimization", {})]
        refuse(
            bool(sharded) and stage in (0, 1, 2),
            f"engine.deepspeed.zero_optimization.{''.join(sharded[:1])} is for sharded weights, which the critic does"
            f" not have with critic.zero_stage {stage}: set that to 3",
        )
