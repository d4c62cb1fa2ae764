"""Settings of the teacher: which model it is, and how the policy learns from it."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Lt
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.about import MAY_CHANGE, About
from hybrid_grpo.config.errors import did_you_mean, refuse
from hybrid_grpo.config.features import FeatureConfig
from hybrid_grpo.config.fields import SECTION, Place, Positive, Switch, Text, Whole
from hybrid_grpo.config.model import PolicyConfig

if TYPE_CHECKING:
    from hybrid_grpo.config.data import DataConfig
    from hybrid_grpo.config.train import TrainConfig

DivergenceName = Literal["reverse_kl", "forward_kl", "jsd"]
_OF_POLICY = ("dtype", "attn_implementation", "shared_prefix")
"""Settings that the teacher takes from the policy."""


@dataclass(frozen=True, config=SECTION)
class TeacherConfig(FeatureConfig):
    """On-policy distillation (GKD, arXiv:2306.13649): a frozen teacher scores the tokens that the policy has sampled.
    In addition to earning rewards, the policy learns to agree with the teacher. There is a teacher if `model`,
    `by_source` or `prompt_column` is set."""

    model: Place | None = None
    """Folder or hub name of the teacher, a causal language model with the policy's tokenizer. Default: if prompt_column
    is set, the policy itself as it is at the beginning of each step."""
    by_source: dict[Text, Text] = field(default_factory=dict)
    """Teachers of single sources of data.mixture, as in `{maths: NAME, code: NAME}`. `model` teaches the others."""
    coef: Positive = 1.0
    """Weight of the divergence between policy and teacher, in nats per token, relative to rewards (`into` advantage) or
    to the loss of the policy (`into` loss)."""
    into: Literal["advantage", "loss"] = "advantage"
    """`advantage` lowers the advantage of every token by coef * (old_logp - teacher_logp), which only needs the
    teacher's log-probability of that token. `loss` adds coef times the divergence over the vocabulary at every token,
    which is less noisy, but keeps the teacher's distributions in host memory until the end of the step."""
    divergence: DivergenceName = "reverse_kl"
    """Divergence with `into` loss: `reverse_kl` is KL(policy || teacher), `forward_kl` is KL(teacher || policy), and
    `jsd` is the generalized Jensen-Shannon divergence of GKD."""
    jsd_beta: Annotated[Positive, Lt(1)] = 0.5
    """Share of the teacher in the mixture of `jsd`: near 0 like forward_kl, near 1 like reverse_kl, but small."""
    top_k: Whole = 0
    """Number of most probable tokens that the teacher's distribution distinguishes at each position, with `into` loss.
    All others count as one token, so the divergence is a lower bound. 0: the whole vocabulary, which takes 4 bytes per
    token of the vocabulary for each sampled token."""
    clamp: Positive | None = None
    """Limit of each token's term, in nats: of the absolute difference of log-probabilities (`into` advantage), or of
    the divergence (`into` loss), whose gradient is 0 above it. Default: none."""
    prompt_column: Text | None = None
    """Column with the teacher's prompt, text or chat, such as question and solution. Default: the policy's prompt."""
    offload: Annotated[Switch, MAY_CHANGE] = True
    """Keep the weights of `model` in host memory and read them once per rollout, as for the reference; if false, keep
    them on the devices. In both cases they are sharded over the ranks."""

    section = "teacher"
    about = About(rank=7)
    feature = "teacher:Teacher"
    page = "docs/distillation.md"

    @property
    def is_on(self) -> bool:
        return self.model is not None or bool(self.by_source) or self.prompt_column is not None

    @property
    def keeps_vocabulary(self) -> bool:
        """Whether the teacher's distributions are kept, not only its log-probabilities of sampled tokens."""
        return self.is_on and self.into == "loss"

    @property
    def teaches(self) -> Literal["sampled", "all"]:
        return "all" if self.keeps_vocabulary else "sampled"

    @property
    def models(self) -> dict[str, str | None]:
        named = {f"teacher.by_source {source}": model for source, model in self.by_source.items()}
        return {"teacher.model": self.model, **named}

    def model_of(self, source: str) -> str | None:
        """Return the model that teaches the prompts of a source; None if it is the policy itself."""
        return self.by_source.get(source, self.model)

    def teachers(self, data: DataConfig) -> list[str | None]:
        """Return the models that teach, each once; None stands for the policy itself."""
        return list(dict.fromkeys(map(self.model_of, data.source_names or [""])))

    def as_policy(self, policy: PolicyConfig, model: str | None) -> PolicyConfig:
        """Return the settings of a teacher (see `teachers`), given those of the policy."""
        shared = {name: getattr(policy, name) for name in _OF_POLICY}
        return PolicyConfig(model=model or policy.model, **shared)

    def check(self, config: TrainConfig) -> None:
        if not self.is_on:
            self.refuse_idle("without a teacher: set teacher.model or teacher.prompt_column")
        if self.into == "advantage":
            self.refuse_idle("with teacher.into advantage: set teacher.into to loss", "top_k", "divergence", "jsd_beta")
        if self.divergence != "jsd":
            self.refuse_idle(f"with teacher.divergence {self.divergence}: set it to jsd", "jsd_beta")
        if self.model is None and not self.by_source:
            self.refuse_idle("if the policy itself is the teacher: set teacher.model", "offload")
        self._check_sources(config.data)
        prompt_column, rollout = config.data.prompt_column, config.rollout
        refuse(
            self.prompt_column == prompt_column,
            f"teacher.prompt_column {prompt_column} is data.prompt_column, which the policy reads: name another column,"
            " or remove teacher.prompt_column",
        )
        refuse(
            self.prompt_column is not None and bool(rollout.environment),
            f"teacher.prompt_column {self.prompt_column} is read instead of the prompt, to which"
            " rollout.environment appends what the policy reads: remove one of them",
        )
        ranks = config.engine.sequence_parallel
        refuse(
            self.is_on and ranks > 1,
            f"teacher compares whole rows, and engine.sequence_parallel {ranks} gives each rank a part: remove one",
        )
        refuse(
            self.is_on and rollout.agent is not None,
            "teacher reads the prompt and a completion, and rollout.agent writes histories: remove one of them",
        )
        refuse(
            self.is_on and self.into == "advantage" and bool(config.off_policy_source),
            f"teacher.into advantage is for tokens that the policy sampled, and {config.off_policy_source} brings"
            f" others: set teacher.into to loss, or remove teacher or {config.off_policy_source}",
        )

    def _check_sources(self, data: DataConfig) -> None:
        names = data.source_names
        for source in self.by_source:
            refuse(
                source not in names,
                f"teacher.by_source {source} is not a source of data.mixture: {did_you_mean(source, names)}",
            )
        open_names = [name for name in names if name not in self.by_source]
        refuse(
            bool(self.by_source) and not open_names and self.model is not None,
            f"teacher.model {self.model} teaches nothing, as teacher.by_source names all sources: remove one",
        )
        refuse(
            bool(self.by_source) and bool(open_names) and self.model is None and self.prompt_column is None,
            f"teacher.by_source has no teacher for source {', '.join(open_names[:1])}: name one, or set teacher.model,"
            " which teaches all sources that are not named",
        )

    def check_place(self, config: TrainConfig, world_size: int) -> None:
        """Raise UserError if there are no reward functions, since metrics and report would be empty."""
        refuse(
            not config.reward_names,
            "rewards is empty: to learn from the teacher alone give one that is only measured, as in --rewards"
            " '[{function: repetition_penalty, weight: 0}]'",
        )
