"""Guests in a run: their completions in each group, the loss from these completions, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.data.batch import Completion, Numbers, Prompt, Rollout, Scores, TrainBatch, measured
from hybrid_grpo.features.guests.settings import GuestsConfig
from hybrid_grpo.features.guests.writers import GuestFile, GuestModel, Learner
from hybrid_grpo.generation.rollout import requests_of
from hybrid_grpo.generation.workspace import workspace_beside
from hybrid_grpo.grpo.advantages import informative
from hybrid_grpo.grpo.loss import LossStats, policy_loss
from hybrid_grpo.model.limits import vocabulary_of
from hybrid_grpo.model.loading import load_config, parameters_of
from hybrid_grpo.model.routing import Routing
from hybrid_grpo.model.sidecars import TokenRow, without
from hybrid_grpo.run.feature import Feature, LossTerm
from hybrid_grpo.run.memory.phases import FeatureMemory, Part
from hybrid_grpo.run.memory.plan import Plan

if TYPE_CHECKING:
    from hybrid_grpo.policy import Policy
    from hybrid_grpo.run.inputs import RunInputs


class GuestMemory(FeatureMemory):
    """Plans the weights of guest models, which every rank holds in full, and on a GPU the memory for decoding that they
    keep. On a CPU, that is released before the policy decodes."""

    name = "guests"

    def __init__(self, config: TrainConfig) -> None:
        self._guests = [
            (parameters_of(guest.model), load_config(guest.model), guest.per_group)
            for guest in config.of(GuestsConfig).writers
            if guest.model is not None
        ]

    def part(self, plan: Plan, on_host: bool) -> Part:
        rollout, dtype = plan.config.rollout, plan.config.policy.dtype
        tokens, held = plan.prompt + rollout.max_completion_tokens, 0
        for parameters, model_config, per_group in self._guests:
            rows, free = plan.batch.prompts_per_rank * per_group, plan.hardware.device_bytes
            _, kept = workspace_beside(rollout, model_config, dtype, rows, tokens, free)
            # Its tower is taken to be as large as the policy's.
            held += plan.dtype * (parameters + plan.tower) + (kept if plan.gpu else 0)
        return Part("guests", 0 if on_host else held, "a smaller model in guests.writers")


class Guests(Feature):
    """All guests of a run. Raises UserError if a guest does not fit the policy; see `GuestFile` and `GuestModel`."""

    name, memory = "guests", GuestMemory
    is_timed = True
    _policy: Policy
    _distilled: frozenset[str] = frozenset()
    """Names of the guests that only other features' terms of the loss learn from."""

    def __init__(self, config: TrainConfig, plan: BatchPlan, inputs: RunInputs) -> None:
        super().__init__(config, plan, inputs)
        vocabulary = vocabulary_of(inputs.tokenizer, load_config(config.policy.model))
        learner = Learner(config, inputs.tokenizer, inputs.prompts, inputs.stop_ids, vocabulary, inputs.sampler.album)
        prompts = plan.prompts_per_rank
        self._guests = [
            (guest, GuestFile(guest, learner) if guest.model is None else GuestModel(guest, learner, prompts))
            for guest in config.of(GuestsConfig).writers
        ]
        self._distilled = frozenset(guest.name for guest, _ in self._guests if guest.weight == "distill")
        self.facts = {f"guest {guest.name}": writer.fact for guest, writer in self._guests}

    def load(self, policy: Policy) -> None:
        self._policy = policy
        for _, writer in self._guests:
            writer.load(policy.engine.device)

    def write(self, prompts: Sequence[Prompt], step: int, beat: Callable[[], None]) -> dict[int, Completion]:
        """See `Feature`. Guests write the last completions of each group; each guest writes `per_group` of them."""
        requests = requests_of(prompts, self.config.rollout, self.config.run.seed, step)
        slot = self.plan.own_generations
        off_policy: dict[int, Completion] = {}
        for guest, writer in self._guests:
            groups = writer.write(prompts, step, beat)
            if guest.weight == "imitation":
                groups = self._as_own(prompts, groups)
            for request, written in zip(requests, groups, strict=True):
                # A writer may have fewer completions than slots.
                # The policy's own routers choose the experts for a text that it did not write.
                learned = guest.weight != "baseline"
                named = [
                    replace(c, writer=guest.name, learned=learned, sidecars=without(c.sidecars, Routing))
                    for c in written
                ]
                off_policy.update(zip(request.keys[slot : slot + guest.per_group], named, strict=False))
            slot += guest.per_group
        return off_policy

    def _as_own(self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> list[list[Completion]]:
        """Return groups of completions with the policy's log-probabilities as those recorded. Collective."""
        prompt_ids = [p.token_ids for p, group in zip(prompts, groups, strict=True) for _ in group]
        token_ids = [completion.token_ids for group in groups for completion in group]
        batches = self._policy.micro_batches(TokenRow.of(prompt_ids, token_ids), gradients=False)
        shape = len(token_ids), max(map(len, token_ids), default=0)
        found = measured(self._policy.engine, batches, shape, self.config.rollout.temperature)
        rows = iter(found[0] if found else ())
        return [[replace(c, logp=next(rows)[: len(c.token_ids)].tolist()) for c in group] for group in groups]

    def loss(self, batch: TrainBatch) -> LossTerm:
        return LossTerm(partial(self._surrogate, batch))

    def _surrogate(
        self, batch: TrainBatch, logp_bT: Tensor, entropy_bT: Tensor, found: Sequence[Tensor]
    ) -> tuple[Tensor | float, Numbers]:
        """Return the surrogate loss, with the ratio of the policy to the guest. KL, entropy and the sampler's
        correction are left out, since they are expectations under the policy."""
        total: Tensor | float = 0.0
        numbers, zeros_bT = Numbers(), torch.zeros_like(entropy_bT)
        for name, rows_b1 in batch.writers.items():
            if name in self._distilled:
                continue
            weight_bT = torch.where(rows_b1, batch.weight_bT, 0.0)
            old_logp_bT, advantages_bT, grpo = batch.sampler_logp_bT, batch.advantages_bT, self.config.grpo
            loss, stats = policy_loss(
                logp_bT, old_logp_bT, advantages_bT, weight_bT, grpo, beta=0.0, entropy_bT=zeros_bT
            )
            if self.inputs.objective is not None:
                loss = self.inputs.objective(
                    logp_bT, old_logp_bT, advantages_bT, weight_bT, grpo, beta=0.0, ref_logp_bT=batch.ref_logp_bT,
                    entropy_bT=zeros_bT, correction_bT=None,
                )  # fmt: skip
            total, numbers = total + loss, numbers | _numbers(name, stats)
        return total, numbers

    def measure(self, rollout: Rollout, scores: Scores) -> Numbers:
        """Return metrics of the guests' completions, and the share of groups that teach nothing even with guests."""
        numbers = Numbers()
        for guest, _ in self._guests:
            rows = [row for row, completion in enumerate(rollout.completions) if completion.writer == guest.name]
            reward_N = scores.reward_B[rows]
            reward_N = reward_N[~reward_N.isnan()]
            numbers[f"guests/{guest.name}/rows"] = len(rows), 1
            numbers[f"guests/{guest.name}/missing"] = guest.per_group * len(rollout.prompts) - len(rows), 1
            numbers[f"guests/{guest.name}/tokens"] = sum(rollout.lengths[row] for row in rows), 1
            numbers[f"guests/{guest.name}/reward"] = reward_N.mean(), len(reward_N)
        teaches_P = informative(scores.reward_B, rollout.num_generations, scores.steps)
        numbers["group/zero_std_frac"] = (~teaches_P).double().mean(), len(teaches_P)
        return numbers


def _numbers(name: str, stats: LossStats) -> Numbers:
    divisor = stats.tokens.clamp(min=1)
    return {
        f"guests/{name}/ratio_mean": (stats.ratio / divisor, stats.tokens),
        f"guests/{name}/ratio_max": (stats.ratio_max, stats.tokens.clamp(max=1)),
        f"guests/{name}/clip_frac": ((stats.clipped_low + stats.clipped_high) / divisor, stats.tokens),
    }
