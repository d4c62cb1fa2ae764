"""Settings of the teacher: which model it is, and how the policy learns from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic.dataclasses import dataclass

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.features import FeatureConfig
from hybrid_grpo.config.fields import SECTION, Positive, Switch, Text, Whole
from hybrid_grpo.config.model import PolicyConfig

if TYPE_CHECKING:
    from hybrid_grpo.config.train import TrainConfig

_OF_POLICY = ("dtype", "attn_implementation", "shared_prefix", "pickled_weights")
"""Settings that the teacher takes from the policy."""


@dataclass(frozen=True, config=SECTION)
class TeacherConfig(FeatureConfig):
    """On-policy distillation (GKD, arXiv:2306.13649): a frozen teacher scores the tokens that the policy has sampled.
    In addition to earning rewards, the policy learns to agree with the teacher. There is a teacher if `model` or
    `prompt_column` is set."""

    model: Text | None = None
    """Folder or hub name of the teacher, a causal language model with the policy's tokenizer. Default: if prompt_column
    is set, the policy itself as it is at the beginning of each step."""
    coef: Positive = 1.0
    """Weight of the KL divergence from the policy to the teacher, in nats per token, relative to rewards (`into`
    advantage) or to the loss of the policy (`into` loss)."""
    into: Literal["advantage", "loss"] = "advantage"
    """`advantage` lowers the advantage of every token by coef * (old_logp - teacher_logp), which only needs the
    teacher's log-probability of that token. `loss` adds coef times the KL divergence over the vocabulary at every
    token, which is less noisy, but keeps the teacher's distributions in host memory until the end of the step."""
    top_k: Whole = 0
    """Number of most probable tokens that the teacher's distribution distinguishes at each position, with `into` loss.
    All others count as one token, so the KL divergence is a lower bound. 0: the whole vocabulary, which takes 4 bytes
    per token of the vocabulary for each sampled token."""
    prompt_column: Text | None = None
    """Column with the teacher's prompt, as text or a chat, such as the question with its solution. Default: the
    policy's prompt."""
    offload: Switch = True
    """Keep the weights of `model` in host memory and read them once per rollout, as for the reference; if false, keep
    them on the devices. In both cases they are sharded over the ranks."""

    section = "teacher"
    feature, planned = "teacher:Teacher", "memory:TeacherMemory"
    page = "docs/distillation.md"
    replaces_groups = "a teacher"
    learns_without_rewards = True
    free = frozenset({"teacher.offload"})

    @property
    def is_on(self) -> bool:
        return self.model is not None or self.prompt_column is not None

    @property
    def keeps_vocabulary(self) -> bool:
        """Whether the teacher's distributions are kept, not only its log-probabilities of sampled tokens."""
        return self.is_on and self.into == "loss"

    @property
    def models(self) -> dict[str, str | None]:
        return {"teacher.model": self.model}

    def as_policy(self, policy: PolicyConfig) -> PolicyConfig:
        """Return the settings of the teacher's model, given those of the policy."""
        shared = {name: getattr(policy, name) for name in _OF_POLICY}
        return PolicyConfig(model=self.model or policy.model, **shared)

    def check(self, config: TrainConfig) -> None:
        prompt_column, rollout = config.data.prompt_column, config.rollout
        if not self.is_on:
            self.refuse_idle("without a teacher: set teacher.model or teacher.prompt_column")
        if self.into == "advantage":
            self.refuse_idle("with teacher.into advantage: set teacher.into to loss", "top_k")
        if self.model is None:
            self.refuse_idle("if the policy itself is the teacher: set teacher.model", "offload")
        refuse(
            self.prompt_column == prompt_column,
            f"teacher.prompt_column {prompt_column} is data.prompt_column, which the policy reads: name another column,"
            " or take teacher.prompt_column out",
        )
        refuse(
            self.prompt_column is not None and bool(rollout.environment),
            f"teacher.prompt_column {self.prompt_column} is read instead of the prompt, to which"
            " rollout.environment appends what the policy reads: take out one of them",
        )
        refuse(
            self.is_on and bool(config.streamer),
            f"teacher is checked with all prompts before the run, which {config.streamer} does not know: take out one"
            " of the two",
        )
        refuse(
            self.is_on and bool(config.giver),
            f"a teacher scores tokens that the policy sampled, and {config.giver} brings others: take out teacher or"
            f" {config.giver}",
        )

    def check_place(self, config: TrainConfig, world_size: int) -> None:
        """Raise UserError if there are no reward functions, since metrics and report would be empty."""
        refuse(
            not config.reward_names,
            "rewards is empty: to learn from the teacher alone give one that is only measured, as in --rewards"
            " '[{function: repetition_penalty, weight: 0}]'",
        )
