"""The teacher's share of the memory plan."""

from functools import partial

import torch

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.features.teacher.divergence import Divergence, NextTokens, head_divergence
from hybrid_grpo.features.teacher.settings import TeacherConfig
from hybrid_grpo.model.loading import parameters_of
from hybrid_grpo.model.logprobs import HeadFunction
from hybrid_grpo.run.memory.phases import Part
from hybrid_grpo.run.memory.plan import FeatureMemory, Plan


class TeacherMemory(FeatureMemory):
    """Plans the sharded weights of all teachers and, with `teacher.into` loss, their distributions at all tokens of a
    rollout, on the host: float32 and, with `top_k`, the tokens. Their forward passes keep nothing, like that of the
    reference, and follow each other, so that no two teachers are gathered at once."""

    name = "teacher"

    def __init__(self, config: TrainConfig) -> None:
        self._settings = settings = config.of(TeacherConfig)
        self._parameters = {name: parameters_of(name) if name else 0 for name in settings.teachers(config.data)}
        weights = {source.name: source.weight for source in config.data.mixture} or {"": 1.0}
        self._shares = [
            (weight / sum(weights.values()), self._parameters[settings.model_of(source)])
            for source, weight in weights.items()
        ]

    def part(self, plan: Plan, on_host: bool) -> Part:
        settings, places = self._settings, plan.rows * plan.config.rollout.max_completion_tokens
        weights = plan.dtype * sum(self._parameters.values()) // plan.ranks if settings.offload == on_host else 0
        # Towers, which every rank has on its device, are taken to be as large as the policy's.
        towers = plan.tower * sum(name is not None for name in self._parameters)
        weights += 0 if on_host else plan.dtype * towers
        kept = places * (8 * settings.top_k or 4 * plan.sizes.vocabulary) if settings.keeps_vocabulary else 0
        fewer = "teacher.top_k 64, " if kept and not settings.top_k else ""
        remedy = f"{fewer}more ranks" if on_host else "teacher.offload true, more ranks"
        return Part("teacher", weights + (kept if on_host else 0), remedy)

    def seconds(self, plan: Plan, forward: float, passes: int) -> float:
        """Return the time of one forward pass in which every row is read by its teacher, which may be the policy
        itself."""
        own = plan.sizes.parameters
        return forward * sum(share * (parameters or own) for share, parameters in self._shares) / own

    def head(self, places: int, vocabulary: int) -> HeadFunction | None:
        if not self._settings.keeps_vocabulary:
            return None
        top_k = self._settings.top_k
        tokens = torch.empty(places, top_k, dtype=torch.int32) if top_k else None
        expected = torch.empty(places, top_k + 1 if top_k else vocabulary)
        divergence = Divergence(self._settings.divergence, self._settings.jsd_beta)
        return partial(head_divergence, teacher=NextTokens(expected, tokens, vocabulary), divergence=divergence)
