"""What a memory plan is made of: parts of memory, and the phases in which they are there together."""

from dataclasses import dataclass


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


def gib(bytes_: int) -> str:
    return f"{bytes_ / 2**30:.1f}" if bytes_ >= 2**30 else f"{bytes_ / 2**30:.2f}"
