"""The configuration of training: its sections, and what must agree between them."""

from __future__ import annotations

from dataclasses import field

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.alarms import AlarmsConfig
from hybrid_grpo.config.critic import CriticConfig
from hybrid_grpo.config.data import CurriculumConfig, DataConfig, PtxConfig
from hybrid_grpo.config.errors import did_you_mean, refuse
from hybrid_grpo.config.evaluation import EvalConfig
from hybrid_grpo.config.fields import SECTION
from hybrid_grpo.config.grpo import GrpoConfig
from hybrid_grpo.config.guard import GuardConfig
from hybrid_grpo.config.guests import check_guests
from hybrid_grpo.config.model import EngineConfig, LoraConfig, PolicyConfig
from hybrid_grpo.config.rewards import RewardList, ScoringConfig, reward_name
from hybrid_grpo.config.rollout import RolloutConfig, environment_rewards
from hybrid_grpo.config.run import CheckpointConfig, LogConfig, RunConfig
from hybrid_grpo.config.teacher import TeacherConfig


@dataclass(frozen=True, config=SECTION)
class ModelRunConfig:
    """What every command with a model has."""

    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)

    @model_validator(mode="after")
    def _check_engine(self) -> ModelRunConfig:
        refuse(
            self.policy.dtype == "bfloat16" and self.engine.zero_stage == 0,
            "policy.dtype bfloat16 needs engine.zero_stage 1 or higher (at stage 0 DeepSpeed keeps no float32 weights):"
            " set engine.zero_stage to 1, or policy.dtype to float32",
        )
        last = max(self.log.profiled, default=0)
        refuse(
            last > self.run.steps,
            f"log.profile {last} is behind the last step, run.steps {self.run.steps}: name an earlier one",
        )
        return self


@dataclass(frozen=True, config=SECTION)
class TrainConfig(ModelRunConfig):
    """GRPO training."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    rewards: RewardList = field(default_factory=list)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    ptx: PtxConfig = field(default_factory=PtxConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def recomputes_old_logp(self) -> bool:
        """Whether a pass of the training forward gives the log-probabilities that ratios are relative to."""
        auto = self.rollout.logprobs == "sampling" or self.grpo.sampler_correction != "none"
        return auto if self.grpo.old_logp == "auto" else self.grpo.old_logp == "policy"

    @property
    def reward_names(self) -> list[str]:
        """Names of all rewards, those of functions first, then those of environments."""
        return [*map(reward_name, self.rewards), *dict.fromkeys(environment_rewards(self.rollout).values())]

    @model_validator(mode="after")
    def _check_sections(self) -> TrainConfig:
        """What must agree between the sections. Commands that only read a recipe for training have checks of their
        own, by overriding this: they may replace its rewards or its lengths."""
        rollout, grpo, names = self.rollout, self.grpo, self.reward_names
        refuse(
            rollout.num_generations < 2 and grpo.baseline != "critic" and not self.teacher.is_set,
            f"rollout.num_generations {rollout.num_generations} makes no group: advantages need 2 or more, or"
            " grpo.baseline critic, or a teacher",
        )
        self._check_critic()
        self._check_teacher()
        check_guests(self)
        refuse(
            rollout.temperature == 0,
            "rollout.temperature 0 samples the same completion for a whole group: give a value above 0",
        )
        refuse(
            self.lora.rank > 0 and grpo.ref_every > 0,
            f"grpo.ref_every {grpo.ref_every} refreshes the reference, which with lora.rank is the model without"
            " adapters: take out one of them",
        )
        refuse(
            grpo.combine_rewards == "normalize" and len(names) == 1,
            "grpo.combine_rewards normalize weighs rewards against each other, and rewards has one: set"
            " grpo.combine_rewards to sum",
        )
        refuse(
            grpo.mask_truncated and rollout.ignore_eos,
            "grpo.mask_truncated leaves nothing to learn from where rollout.ignore_eos cuts every completion: set one"
            " of them to false",
        )
        refuse(
            grpo.overlong_buffer >= rollout.max_completion_tokens,
            f"grpo.overlong_buffer {grpo.overlong_buffer} punishes every completion: set it below"
            f" rollout.max_completion_tokens {rollout.max_completion_tokens}",
        )
        twice = next((name for name in names if names.count(name) > 1), None)
        refuse(twice is not None, f"rewards: {twice} is also the name of an environment's reward: set `name` on one")
        outcome = self.eval.outcome
        refuse(
            outcome is not None and outcome not in names,
            f"eval.outcome {outcome!r} is not a reward of this run: {did_you_mean(outcome or '', names)}",
        )
        refuse(
            not self.data.shuffle and self.curriculum.follows,
            "data.shuffle false keeps the order of the source, which curriculum changes: set it to true, or take out"
            " the settings of curriculum",
        )
        self.data.check_stream(follows=self.curriculum.follows, teacher=self.teacher.is_set)
        for reward in self.rewards:
            for source in reward.sources:
                refuse(
                    source not in self.data.source_names,
                    f"rewards: {reward_name(reward)} is for source {source}, which data.mixture does not have:"
                    f" {did_you_mean(source, self.data.source_names)}",
                )
        if self.data.eval_path is None and self.data.eval_split is None:
            every = 0 if self.eval.sets else self.eval.every
            for setting, value in (("eval.every", every), ("data.eval_limit", self.data.eval_limit)):
                refuse(bool(value), f"{setting} {value} needs held-out prompts: set data.eval_path or data.eval_split")
        return self

    def _check_critic(self) -> None:
        grpo, critic = self.grpo, self.critic
        if grpo.baseline != "critic":
            name, value = next(iter(critic.changed.items()), ("", None))
            shown = str(value).lower() if isinstance(value, bool) else value
            refuse(
                bool(name),
                f"critic.{name} {shown} has no effect with grpo.baseline {grpo.baseline}: set grpo.baseline to critic,"
                f" or take critic.{name} out",
            )
            return
        critic.check(self.policy, self.engine)
        refuse(
            grpo.dynamic_sampling and self.rollout.num_generations < 2,
            "grpo.dynamic_sampling replaces groups of equal rewards, which all groups of rollout.num_generations 1 are:"
            " set grpo.dynamic_sampling to false, or rollout.num_generations to 2 or more",
        )
        refuse(
            critic.warmup_steps >= self.run.steps,
            f"critic.warmup_steps {critic.warmup_steps} leaves the policy none of run.steps {self.run.steps}: lower it",
        )

    def _check_teacher(self) -> None:
        self.teacher.check(self.data.prompt_column)
        refuse(
            self.teacher.prompt_column is not None and bool(self.rollout.environment),
            f"teacher.prompt_column {self.teacher.prompt_column} is read in place of the prompt, at whose end"
            " rollout.environment writes what the policy reads: take out one of them",
        )
        compares = ("baseline", "scale_rewards", "combine_rewards", "step_credit", "overlong_buffer", "kl_in")
        for name in (*compares, "dynamic_sampling") if self.rollout.num_generations < 2 else ():
            value, default = getattr(self.grpo, name), GrpoConfig.__dataclass_fields__[name].default
            refuse(
                value != default and self.grpo.baseline != "critic",
                f"grpo.{name} {str(value).lower()} is about rewards in a group, and rollout.num_generations 1 makes"
                f" none: set rollout.num_generations to 2 or more, or take grpo.{name} out",
            )
