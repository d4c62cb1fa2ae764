"""One teacher of a run: its checks, the prompts that it reads, and its weights."""

from dataclasses import replace
from typing import Any

from hybrid_grpo import engine as engines
from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.data.batch import MicroBatch, Prompt
from hybrid_grpo.data.pictures import sight_of
from hybrid_grpo.data.prompts import read_prompt
from hybrid_grpo.features.teacher.settings import TeacherConfig
from hybrid_grpo.model.architectures import undecodable
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.files import check_files
from hybrid_grpo.model.limits import check_lengths, check_prompt_ids, vocabulary_of
from hybrid_grpo.model.loading import load_config, load_model, load_tokenizer, training_attention
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.sight import VisionEncoder, check_sight
from hybrid_grpo.policy import Policy
from hybrid_grpo.run.inputs import RunInputs
from hybrid_grpo.turns.partners import with_tools

_LONGEST_PROMPT = 2**20
"""Practically no limit, in tokens: the teacher's prompts are limited by its positions, not by the policy's settings."""


class TeacherModel:
    """A frozen model, or the policy itself if `name` is None.

    Attributes:
        engine: runs its forward pass, once it is loaded.
    """

    engine: Any = None
    _sight: VisionEncoder | None = None

    def __init__(self, name: str | None, config: TrainConfig, inputs: RunInputs) -> None:
        self.name, self._config, self._inputs, self.settings = name, config, inputs, config.of(TeacherConfig)
        named = (setting for setting, model in self.settings.models.items() if name is not None and model == name)
        self._setting = next(named, "policy.model")
        self._own = self.settings.as_policy(config.policy, name)
        self.model_config = load_config(self._own.model, self._setting)
        text_config = self.model_config.get_text_config()
        self._positions = getattr(text_config, "max_position_embeddings", None) or _LONGEST_PROMPT
        self.vocabulary = vocabulary_of(inputs.tokenizer, self.model_config)
        data = replace(config.data, max_prompt_tokens=_LONGEST_PROMPT)
        column = self.settings.prompt_column
        # A prompt's text already has its system message.
        data = replace(data, system_prompt=None) if column is None else replace(data, prompt_column=column)
        self._data = with_tools(data, inputs.partners)

    def check(self) -> None:
        """Raise UserError, before weights load, if it cannot read its prompts or be compared with the policy."""
        policy, rollout, setting = self._config.policy, self._config.rollout, self._setting
        if self.name is not None:
            reason = undecodable(self.model_config)
            what = f"{setting} {self.name}: {self.model_config.model_type}: {reason}: take another model"
            refuse(reason is not None, what)
            self._check_rows()
            if self._inputs.sampler.sees:
                check_sight(self.model_config, load_config(policy.model), f"{setting} {self.name}")
        own = vocabulary_of(self._inputs.tokenizer, load_config(policy.model))
        refuse(
            rollout.logprobs == "mask" and self.vocabulary < own,
            f"{setting} {self.name} has {self.vocabulary} tokens and the policy {own}, which rollout.logprobs mask may"
            " leave to choose from: set rollout.logprobs to softmax",
        )
        prompts = [prompt for prompt in self._inputs.prompts if self.teaches(prompt)]
        if prompts:  # the rows of a source may all be too long for the policy
            self._check_prompts(list(map(self.reads, prompts)))

    def _check_rows(self) -> None:
        """Refuse a model whose files, tokenizer or attention do not match the policy's."""
        own, policy, setting = self._own, self._config.policy, self._setting
        check_files(own.model, self.model_config, setting=setting)
        refuse(
            load_tokenizer(own.model, setting).get_vocab() != self._inputs.tokenizer.get_vocab(),
            f"{setting} {own.model} has another tokenizer than policy.model {policy.model}: take one of its family",
        )
        packs, policy_packs = (
            training_attention(own, config) == ATTENTION for config in (self.model_config, load_config(policy.model))
        )
        refuse(
            packs != policy_packs,
            f"{setting} {own.model} and policy.model cannot read the same rows, since only one of them needs padding:"
            " set policy.attn_implementation to sdpa",
        )

    def _check_prompts(self, read: list[list[int]]) -> None:
        rollout, column = self._config.rollout, self.settings.prompt_column
        check_prompt_ids(read, self.model_config)
        lengths, what = rollout.lengths, "the longest prompt"
        longest = rollout.longest(self._inputs.longest_prompt)
        if column is not None:
            longest = max(map(len, read)) + rollout.max_read_tokens
            lengths, what = f"the texts of {column} + rollout.max_completion_tokens", f"the longest text of {column}"
        model = f"{self._setting} {self._own.model}"
        check_lengths(self.model_config, longest, lengths, model, f"{what} with its completion")

    def load(self, policy: Policy) -> None:
        """Load its weights, sharded over the ranks. Collective."""
        fetching = dict(self._config.engine.fetching)
        if not self.settings.offload:
            fetching["offload_param"] = {"device": "none"}

        def read() -> LogprobModel:
            return LogprobModel(load_model(self._own, training_attention(self._own), self._setting), self.vocabulary)

        self.engine = policy.engine if self.name is None else engines.OffloadedModel(read, self._own.dtype, fetching)
        if self.name is not None and self._inputs.sampler.sees:
            self._sight = sight_of(self._inputs.sampler.album, self._own, self.engine.device, self._setting)

    def seen(self, micro: MicroBatch) -> MicroBatch:
        """Return a micro-batch of the policy as it sees the pictures."""
        return micro if self._sight is None else micro.seen_by(self._sight)

    def teaches(self, prompt: Prompt) -> bool:
        """Whether completions of a prompt are its to score."""
        return self.settings.model_of(prompt.source) == self.name

    def reads(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt as it reads it; raises UserError if the row has none for it."""
        column, where = self.settings.prompt_column, f"row {prompt.id} (from 0) of data.path"
        if column is None:
            return prompt.token_ids
        album, row = self._inputs.sampler.album, prompt.columns
        if column not in row:
            known = did_you_mean(column, row)
            raise UserError(f"teacher.prompt_column {column}: {where} has no such column: {known}")
        try:
            seen = None if album is None else (album, None)
            return read_prompt(prompt.id, row, where, self._data, self._inputs.tokenizer, seen).token_ids
        except UserError as error:
            raise UserError(str(error).replace("data.prompt_column", "teacher.prompt_column")) from None
