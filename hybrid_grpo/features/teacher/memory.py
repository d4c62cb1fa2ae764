"""The teacher's share of the memory plan."""

from functools import partial

import torch

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.features.teacher.divergence import NextTokens, reverse_kl
from hybrid_grpo.features.teacher.settings import TeacherConfig
from hybrid_grpo.model.loading import parameters_of
from hybrid_grpo.model.logprobs import HeadFunction
from hybrid_grpo.run.memory.parts import Part
from hybrid_grpo.run.memory.plan import FeatureMemory, Plan


class TeacherMemory(FeatureMemory):
    """Plans the teacher's sharded weights and, with `teacher.into` loss, its distributions at all tokens of a rollout,
    on the host: float32 and, with `top_k`, the tokens. Its forward pass keeps nothing, like that of the reference."""

    name = "teacher"

    def __init__(self, config: TrainConfig) -> None:
        self._settings = config.of(TeacherConfig)
        self._parameters = parameters_of(self._settings.model) if self._settings.model else 0

    def part(self, plan: Plan, on_host: bool) -> Part:
        settings, places = self._settings, plan.rows * plan.config.rollout.max_completion_tokens
        weights = plan.dtype * self._parameters // plan.ranks if settings.offload == on_host else 0
        kept = places * (8 * settings.top_k or 4 * plan.sizes.vocabulary) if settings.keeps_vocabulary else 0
        fewer = "teacher.top_k 64, " if kept and not settings.top_k else ""
        remedy = f"{fewer}more ranks" if on_host else "teacher.offload true, more ranks"
        return Part("teacher", weights + (kept if on_host else 0), remedy)

    def seconds(self, plan: Plan, forward: float, passes: int) -> float:
        """Return the time of one forward pass of the teacher, which may be the policy itself."""
        own = plan.sizes.parameters
        return forward * (self._parameters or own) / own

    def head(self, places: int, vocabulary: int) -> HeadFunction | None:
        if not self._settings.keeps_vocabulary:
            return None
        top_k = self._settings.top_k
        tokens = torch.empty(places, top_k, dtype=torch.int32) if top_k else None
        expected = torch.empty(places, top_k + 1 if top_k else vocabulary)
        return partial(reverse_kl, teacher=NextTokens(expected, tokens, vocabulary))
