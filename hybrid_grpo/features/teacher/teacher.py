"""The teacher of a run: a frozen model next to the policy, or the policy itself with another prompt.

distillation.py explains what the policy learns from the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo import engine as engines
from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.data.batch import MicroBatch, Numbers, Prompt, Rollout, TrainBatch
from hybrid_grpo.data.prompts import read_prompt
from hybrid_grpo.features.teacher.distillation import measure_teacher, teacher_advantages, teacher_loss
from hybrid_grpo.features.teacher.divergence import NextTokens, most_likely, reverse_kl
from hybrid_grpo.features.teacher.settings import TeacherConfig
from hybrid_grpo.model.architectures import undecodable
from hybrid_grpo.model.compatibility import check_compatible
from hybrid_grpo.model.limits import check_lengths, check_prompt_ids
from hybrid_grpo.model.loading import load_config, load_model, training_attention
from hybrid_grpo.model.logprobs import HeadFunction, LogprobModel
from hybrid_grpo.model.upload import upload
from hybrid_grpo.policy import Policy
from hybrid_grpo.run.feature import Feature, Scored
from hybrid_grpo.run.inputs import RunInputs
from hybrid_grpo.turns.partners import with_tools

_LONGEST_PROMPT = 2**20
"""Practically no limit, in tokens: the teacher's prompts are limited by its positions, not by the policy's settings."""


class Teacher(Feature):
    """Scores the tokens that the policy has sampled. If `teacher.model` is not set, the policy is its own teacher. See
    distillation.py."""

    name = "teacher"
    is_timed = needs_old_logp = True
    _engine: engines.Engine | engines.Frozen
    _policy: Policy

    def __init__(self, config: TrainConfig, plan: BatchPlan, inputs: RunInputs) -> None:
        super().__init__(config, plan, inputs)
        check_teacher(config, inputs)
        self._settings, self._temperature = config.of(TeacherConfig), config.rollout.temperature
        self._reads, self._vocabulary = _reader(config, inputs), _vocabulary(config)
        self._next_tokens: list[NextTokens] = []

    def load(self, policy: Policy) -> None:
        config, settings = self.config, self._settings
        self._policy, self._engine = policy, policy.engine
        if settings.model is None:
            return
        own, fetching = settings.as_policy(config.policy), dict(config.engine.fetching)

        def read() -> LogprobModel:
            return LogprobModel(load_model(own, training_attention(own), "teacher.model"))

        if not settings.offload:
            fetching["offload_param"] = {"device": "none"}
        self._engine = engines.Frozen(read, own.dtype, fetching)

    def bonus(self, scored: Scored) -> tuple[Tensor | None, Numbers]:
        """Return the teacher's term in the advantages. With `teacher.into` loss there is none, and the teacher's
        distributions are kept for `head`. Collective."""
        assert scored.old_logp_BT is not None
        logp_BT, self._next_tokens = self.read(scored.rollout, scored.old_logp_BT)
        real_BT = upload(scored.rollout.mask_BT, logp_BT.device)
        numbers = measure_teacher(scored.old_logp_BT, logp_BT, real_BT)
        if self._settings.into == "loss":
            return None, numbers
        return teacher_advantages(scored.old_logp_BT, logp_BT, self._settings.coef), numbers

    @torch.no_grad()
    def read(self, rollout: Rollout, old_logp_BT: Tensor) -> tuple[Tensor, list[NextTokens]]:
        """Return the teacher's log-probabilities [B, T] of a rollout, at the sampling temperature; with `teacher.into`
        loss also its distributions, [B] in host memory. `old_logp_BT` is on the policy's device. Collective."""
        prompt_ids = [ids for ids in map(self._reads, rollout.prompts) for _ in range(rollout.num_generations)]
        _, completion_ids, places = rollout.read_ids
        head: HeadFunction | None = None
        if self._settings.into == "loss":
            head = partial(most_likely, vocabulary=self._vocabulary, top_k=self._settings.top_k)
        logp_BT = torch.zeros_like(old_logp_BT)
        found: dict[int, NextTokens] = {}
        for micro in self._policy.micro_batches(
            prompt_ids, completion_ids, gradients=False, places=places, supports=rollout.supports
        ):
            logp_N, _, *kept = self._engine(*micro.inputs, self._temperature, head)
            if not micro.rows:
                continue
            logp_BT[micro.row_b, : micro.mask_bT.shape[1]] = micro.unflatten(logp_N)
            if kept:
                next_tokens = NextTokens(kept[0], kept[1] if kept[1:] else None, self._vocabulary)
                lengths = [rollout.lengths[row] for row in micro.rows]
                found.update(zip(micro.rows, next_tokens.split(lengths), strict=True))
        return logp_BT, [found[row] for row in range(len(places))] if head is not None else []

    def head(self, micro: MicroBatch) -> HeadFunction | None:
        """Return a function that computes KL(policy || teacher) at the completion tokens of a micro-batch; None unless
        `teacher.into` is `loss`. For a micro-batch without rows, the computed value has no meaning."""
        if not self._next_tokens:
            return None
        first, *others = [self._next_tokens[row] for row in micro.rows] or [self._next_tokens[0].first()]
        return partial(reverse_kl, teacher=first.joined(others).to(micro.mask_bT.device))

    def loss(
        self, batch: TrainBatch, logp_bT: Tensor, entropy_bT: Tensor, found: Sequence[Tensor]
    ) -> tuple[Tensor | float, Numbers]:
        if not self._next_tokens:
            return 0.0, {}
        real_bT = batch.weight_bT > 0
        kl_bT, tokens = torch.where(real_bT, found[0], 0.0), real_bT.sum()
        mean = kl_bT.detach().sum() / tokens.clamp(min=1)
        return teacher_loss(kl_bT, batch.weight_bT, self._settings.coef), {"teacher/loss": (mean, tokens)}


def check_teacher(config: TrainConfig, inputs: RunInputs) -> None:
    """Raise UserError, before weights load, if the teacher cannot read its prompts or be compared with the policy."""
    settings = config.of(TeacherConfig)
    policy = settings.as_policy(config.policy)
    setting = "policy.model" if settings.model is None else "teacher.model"
    model_config = load_config(policy.model, setting)
    if settings.model is not None:
        _check_model(config, model_config, inputs.tokenizer)
    refuse(
        settings.top_k >= _vocabulary(config),
        f"teacher.top_k {settings.top_k} is not less than the {_vocabulary(config)} tokens of the vocabulary: set it"
        " to 0, which takes all",
    )
    own = load_config(config.policy.model).get_text_config().vocab_size
    refuse(
        config.rollout.logprobs == "mask" and _vocabulary(config) < own,
        f"teacher.model {settings.model} has {_vocabulary(config)} tokens and the policy {own}, which"
        " rollout.logprobs mask may leave to choose from: set rollout.logprobs to softmax",
    )
    read = list(map(_reader(config, inputs), inputs.prompts))
    check_prompt_ids(read, model_config)
    rollout, column, longest = config.rollout, settings.prompt_column, config.rollout.longest(inputs.longest_prompt)
    lengths, what = rollout.lengths, "the longest prompt"
    if column is not None:
        longest = max(map(len, read)) + rollout.max_read_tokens
        lengths, what = f"the texts of {column} + rollout.max_completion_tokens", f"the longest text of {column}"
    check_lengths(model_config, longest, lengths, f"{setting} {policy.model}", f"{what} with its completion")


def _check_model(config: TrainConfig, model_config: Any, tokenizer: Any) -> None:
    own = config.of(TeacherConfig).as_policy(config.policy)
    reason = undecodable(model_config)
    refuse(reason is not None, f"teacher.model {own.model}: {model_config.model_type}: {reason}: take another model")
    check_compatible(own, model_config, config.policy, tokenizer, "teacher")


def _vocabulary(config: TrainConfig) -> int:
    """Return the number of tokens that both output heads have. Heads in a model family may differ in size."""
    names = {config.policy.model, config.of(TeacherConfig).as_policy(config.policy).model}
    return min(load_config(name).get_text_config().vocab_size for name in names)


def _reader(config: TrainConfig, inputs: RunInputs) -> Callable[[Prompt], list[int]]:
    """Return a function from a prompt to the teacher's prompt tokens; it raises UserError if the row has none."""
    column = config.of(TeacherConfig).prompt_column
    if column is None:
        return lambda prompt: prompt.token_ids
    data = replace(config.data, prompt_column=column, max_prompt_tokens=_LONGEST_PROMPT)
    data = with_tools(data, inputs.partners)

    def read(prompt: Prompt) -> list[int]:
        where = f"row {prompt.id} (from 0) of data.path"
        if column not in prompt.columns:
            known = did_you_mean(column, prompt.columns)
            raise UserError(f"teacher.prompt_column {column}: {where} has no such column: {known}")
        try:
            return read_prompt(prompt.id, prompt.columns, where, data, inputs.tokenizer).token_ids
        except UserError as error:
            raise UserError(str(error).replace("data.prompt_column", "teacher.prompt_column")) from None

    return read
