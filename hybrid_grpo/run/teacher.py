"""The teacher of a run: a model beside the policy that is not trained, or the policy itself with more to read.

What is made of its word is told in grpo/distillation.py, and when it is asked by the trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo import engine as engines
from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.data.batch import Numbers, Prompt, Rollout
from hybrid_grpo.data.prompts import read_prompt
from hybrid_grpo.grpo.distillation import TeacherSignal, measure_teacher, teacher_advantages
from hybrid_grpo.model.architectures import undecodable
from hybrid_grpo.model.companions import check_companion
from hybrid_grpo.model.divergence import NextTokens, most_likely
from hybrid_grpo.model.loading import check_prompt_ids, load_config, load_model, training_attention
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.upload import upload
from hybrid_grpo.policy import Policy
from hybrid_grpo.run.inputs import RunInputs
from hybrid_grpo.turns import with_tools

_LONGEST_PROMPT = 2**20
"""Tokens of what a teacher reads: its own positions are the limit, and not what the policy is given."""


class Teacher:
    """A model that tells how probable it finds what the policy has sampled. Making one is collective.

    Args:
        config: the run's settings.
        policy: what learns from it; with no `teacher.model` it is its own teacher.
        inputs: the tokenizer, which is the teacher's too, and the tools.
    """

    def __init__(self, config: TrainConfig, policy: Policy, inputs: RunInputs) -> None:
        self._policy, self._temperature = policy, config.rollout.temperature
        self._reads, settings = _reader(config, inputs), config.teacher
        self._engine: engines.Engine | engines.Frozen = policy.engine
        if settings.model is not None:
            own, fetching = settings.as_policy(config.policy), dict(config.engine.fetching)

            def read() -> LogprobModel:
                return LogprobModel(load_model(own, training_attention(own), "teacher.model"))

            if not settings.offload:
                fetching["offload_param"] = {"device": "none"}
            self._engine = engines.Frozen(read, own.dtype, fetching)
        self._coef, self._vocabulary = settings.coef, _vocabulary(config)
        head = partial(most_likely, vocabulary=self._vocabulary, top_k=settings.top_k)
        self._head = head if settings.into == "loss" else None

    @torch.no_grad()
    def read(self, rollout: Rollout, old_logp_BT: Tensor) -> tuple[TeacherSignal, Numbers]:
        """What it says of a rollout, at the temperature of sampling, and its numbers. Collective.

        Args:
            old_logp_BT: of the policy that sampled; on the policy's device.
        """
        prompt_ids = [ids for ids in map(self._reads, rollout.prompts) for _ in range(rollout.num_generations)]
        _, completion_ids, places = rollout.read_ids
        logp_BT = torch.zeros_like(old_logp_BT)
        found: dict[int, NextTokens] = {}
        for micro in self._policy.micro_batches(prompt_ids, completion_ids, gradients=False, places=places):
            logp_N, _, *kept = self._engine(*micro.inputs, self._temperature, self._head)
            if not micro.rows:
                continue
            logp_BT[micro.row_b, : micro.mask_bT.shape[1]] = micro.unflatten(logp_N)
            if kept:
                next_tokens = NextTokens(kept[0], kept[1] if kept[1:] else None, self._vocabulary)
                lengths = [rollout.lengths[row] for row in micro.rows]
                found.update(zip(micro.rows, next_tokens.split(lengths), strict=True))
        coef, numbers = self._coef, measure_teacher(old_logp_BT, logp_BT, upload(rollout.mask_BT, logp_BT.device))
        if self._head is not None:
            return TeacherSignal(coef, next_tokens=[found[row] for row in range(len(places))]), numbers
        return TeacherSignal(coef, teacher_advantages(old_logp_BT, logp_BT, coef)), numbers


def check_teacher(config: TrainConfig, inputs: RunInputs) -> None:
    """Refuse a teacher that cannot read what it is given, or cannot be compared with the policy, before weights
    load."""
    settings, policy = config.teacher, config.teacher.as_policy(config.policy)
    setting = "policy.model" if settings.model is None else "teacher.model"
    model_config = load_config(policy.model, setting)
    if settings.model is not None:
        _check_model(config, model_config, inputs.tokenizer)
    refuse(
        settings.top_k >= _vocabulary(config),
        f"teacher.top_k {settings.top_k} is not less than the {_vocabulary(config)} tokens of the vocabulary: set it"
        " to 0, which takes all",
    )
    read = list(map(_reader(config, inputs), inputs.prompts))
    check_prompt_ids(read, model_config)
    limit, column = getattr(model_config, "max_position_embeddings", None), settings.prompt_column
    what = "the longest prompt" if column is None else f"the longest text of {column}"
    rollout, own = config.rollout, inputs.longest_prompt
    longest = rollout.longest(own) if column is None else max(map(len, read)) + rollout.max_read_tokens
    refuse(
        limit is not None and longest > limit,
        f"{setting} {policy.model} has {limit} positions, and {what} with its completion is {longest} tokens for the"
        f" teacher: lower rollout.max_completion_tokens by {longest - (limit or 0)}, or shorten the prompts",
    )


def _check_model(config: TrainConfig, model_config: Any, tokenizer: Any) -> None:
    own = config.teacher.as_policy(config.policy)
    reason = undecodable(model_config)
    refuse(reason is not None, f"teacher.model {own.model}: {model_config.model_type}: {reason}: take another model")
    check_companion(own, model_config, config.policy, tokenizer, "teacher")


def _vocabulary(config: TrainConfig) -> int:
    """Tokens that both heads have. Models of one family may have rows for tokens that no tokenizer gives."""
    names = {config.policy.model, config.teacher.as_policy(config.policy).model}
    return min(load_config(name).get_text_config().vocab_size for name in names)


def _reader(config: TrainConfig, inputs: RunInputs) -> Callable[[Prompt], list[int]]:
    """Gives what the teacher reads in place of a prompt. Raises UserError where the row has nothing for it."""
    column = config.teacher.prompt_column
    if column is None:
        return lambda prompt: prompt.token_ids
    data = replace(config.data, prompt_column=column, max_prompt_tokens=_LONGEST_PROMPT)
    data = with_tools(data, inputs.conversations)

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
