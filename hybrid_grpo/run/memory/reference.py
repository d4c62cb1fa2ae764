"""The reference's share of the memory plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_grpo.config.adapters import is_adapter
from hybrid_grpo.run.memory.parts import Part

if TYPE_CHECKING:
    from hybrid_grpo.run.memory.plan import Plan


def held(plan: Plan) -> Part:
    """Return the reference in host memory, sharded over the ranks, and the float32 average that it may be the rounding
    of, with that of its tower. With new adapters, it takes no memory of its own."""
    grpo, each = plan.config.grpo, plan.n // plan.ranks
    loaded = grpo.has_reference and (not plan.config.lora.rank or is_adapter(plan.config.policy.model))
    average = 4 * (each + plan.tower.trained) if grpo.averages_reference and plan.dtype == 2 else 0
    return Part("reference", plan.dtype * each + average if loaded else 0, "grpo.beta 0, more ranks")


def saved(plan: Plan) -> int:
    """Return the bytes of the reference in this rank's files of a checkpoint."""
    grpo = plan.config.grpo
    return (4 if grpo.averages_reference else plan.dtype) * plan.n // plan.ranks if grpo.ref_every else 0
