"""Reads what a model needs to complete prompts, except its weights, and checks that it can complete them."""

from dataclasses import dataclass
from typing import Any, Self

from hybrid_grpo.config import DataConfig, PolicyConfig, RolloutConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.data.completions import is_chat, unended_turn
from hybrid_grpo.data.pictures import ImageStore
from hybrid_grpo.model.architectures import check_architecture
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.files import check_files
from hybrid_grpo.model.limits import check_lengths, check_prompt_ids, check_token_ids, gaps_of, stop_ids, vocabulary_of
from hybrid_grpo.model.loading import load_config, load_tokenizer, training_attention
from hybrid_grpo.model.sight import reads_both_ways
from hybrid_grpo.turns.partners import Partners

_SAMPLING = ("temperature", "top_p", "top_k")
"""Settings that are always shown. The ones below are shown if they are not the default."""
_SAMPLING_IF_SET = (
    "min_p", "repetition_penalty", "logit_bias", "min_completion_tokens", "max_turn_tokens", "max_total_tokens",
    "ignore_eos", "logprobs", "decoder",
)  # fmt: skip


@dataclass(frozen=True)
class SamplingContext:
    """What a model needs to sample completions, except its weights."""

    rollout: RolloutConfig
    """How the model samples."""
    model_config: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""
    album: ImageStore | None = None
    """Takes the pictures of prompts; None if the model sees none."""
    unused: int = 0
    """Number of ids of the model that are not tokens, and so are never sampled."""

    @classmethod
    def read(cls, policy: PolicyConfig, rollout: RolloutConfig, *, needs_weights: bool = True) -> Self:
        """Read all but weights. Raise UserError if the model cannot sample, or needed files are damaged or absent."""
        config = load_config(policy.model)
        check_architecture(config, rollout.decoder)
        check_files(policy.model, config, needed=needs_weights)
        tokenizer = load_tokenizer(policy.model)
        size = vocabulary_of(tokenizer, config)
        check_token_ids(rollout, size)
        ends, album = stop_ids(policy.model, tokenizer, rollout.stop_ids, config), ImageStore.of(policy.model, config)
        unused = config.get_text_config().vocab_size - size + len(gaps_of(tokenizer))
        return cls(rollout, config, tokenizer, ends, album, unused)

    @property
    def sees(self) -> bool:
        """Whether prompts that were read have pictures."""
        return self.album is not None and not self.album.empty

    def check_sight(self, policy: PolicyConfig) -> None:
        """Refuse settings with which the model cannot see, if prompts that were read have pictures."""
        if not self.sees:
            return
        refuse(
            self.rollout.decoder != "paged",
            f"rollout.decoder {self.rollout.decoder} reads no pictures, and prompts have some: remove it",
        )
        refuse(
            reads_both_ways(self.model_config) is not None and training_attention(policy) != ATTENTION,
            f"policy.attn_implementation {policy.attn_implementation}: policy.model reads pictures in both directions,"
            " which only packed rows do: set it to auto",
        )

    @property
    def fact(self) -> str:
        """One line with the sampling settings in force; the model's own generation config does not change them."""
        rollout, default = self.rollout, RolloutConfig()
        names = [*_SAMPLING, *(n for n in _SAMPLING_IF_SET if getattr(rollout, n) != getattr(default, n))]
        values = (getattr(rollout, name) for name in names)
        settings = [f"{n} {v:g}" if isinstance(v, float) else f"{n} {v}" for n, v in zip(names, values, strict=True)]
        ids = () if rollout.ignore_eos else self.stop_ids
        ended_by = [
            *(f"{token} {self.tokenizer.convert_ids_to_tokens(token)!r}" for token in ids),
            *(f"text {text!r}" for text in rollout.stop_strings),
        ]
        return (
            f"{', '.join(settings)}, at most {rollout.max_completion_tokens} tokens,"
            f" ended by {', '.join(ended_by) or 'the limit only'}"
            + (f"; never one of the model's {self.unused} ids that are no tokens" if self.unused else "")
        )

    def warning(self, prompts: list[Prompt], config: DataConfig) -> str:
        """Return a warning if prompts are chats in which the end of a turn ends no completion; see `unended_turn`."""
        if self.rollout.ignore_eos or not any(is_chat(prompt, config) for prompt in prompts):
            return ""
        return unended_turn(self.tokenizer, self.stop_ids, self.rollout.stop_strings)

    def check_prompts(
        self, prompts: list[Prompt], partners: Partners | None, rollout: RolloutConfig | None = None
    ) -> None:
        """Refuse prompts that the model cannot read, that leave no room for a completion, or that lack what their
        environments need. `rollout` has the limits of lengths; by default, `self.rollout` is used."""
        self.check_room(max(len(prompt.token_ids) for prompt in prompts), rollout)
        self.check_readable(prompts, partners)

    def check_readable(self, prompts: list[Prompt], partners: Partners | None) -> None:
        """Refuse prompts that the model cannot read, or that lack what their environments need."""
        check_prompt_ids([prompt.token_ids for prompt in prompts], self.model_config)
        if partners is not None:
            partners.check(prompts)

    def check_room(self, longest: int, rollout: RolloutConfig | None = None) -> None:
        """Refuse prompts of up to `longest` tokens if they, or they and a completion, are too long for the model."""
        rollout = rollout or self.rollout
        total, opened = rollout.max_total_tokens, longest + (rollout.max_tool_tokens if rollout.environment else 0)
        refuse(
            total is not None and opened >= total,
            f"rollout.max_total_tokens {total} leaves no tokens to sample after a prompt of {opened}: raise it or lower"
            f" {'rollout.max_tool_tokens, a part of it' if opened > longest else 'data.max_prompt_tokens below it'}",
        )
        check_lengths(self.model_config, rollout.longest(longest), rollout.lengths)
