"""What a memory plan is made of: parts of memory, and the phases in which they are there together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid_grpo.config import TrainConfig

if TYPE_CHECKING:
    from hybrid_grpo.model.logprobs import HeadFunction
    from hybrid_grpo.run.memory.plan import Plan


@dataclass(frozen=True)
class Part:
    name: str
    bytes: int
    remedy: str = ""
    """Changes that make the part smaller, the best first."""
    fewest: int | None = None
    """The fewest bytes that suffice; None means all of them."""

    @property
    def least(self) -> int:
        return self.bytes if self.fewest is None else self.fewest


@dataclass(frozen=True)
class Phase:
    """Parts that are in memory at the same time."""

    name: str
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def least(self) -> int:
        """Bytes without which the phase cannot run."""
        return sum(part.least for part in self.parts)


class FeatureMemory:
    """A feature's share of the memory plan. Features override the methods."""

    name = ""

    def __init__(self, config: TrainConfig) -> None: ...

    def part(self, plan: Plan, on_host: bool) -> Part:
        """Return the memory that the feature holds from step to step, on the host or on the device."""
        raise NotImplementedError

    def seconds(self, plan: Plan, forward: float, passes: int) -> float:
        """Return the seconds that the feature adds to a step, if a forward pass of the policy over a rollout takes
        `forward` seconds, and training on the rollout takes as long as `passes` forward passes."""
        return 0.0

    def head(self, places: int, vocabulary: int) -> HeadFunction | None:
        """Return what the policy's head computes in addition for `places` target tokens in training, or None."""
        return None


def gib(bytes_: int) -> str:
    return f"{bytes_ / 2**30:.1f}" if bytes_ >= 2**30 else f"{bytes_ / 2**30:.2f}"
