"""How environments begin and end. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Opening:
    """How the environment of a prompt begins: alike for all of its completions."""

    seed: int
    """What `random` is seeded with before the environment is made and reset."""
    text: str | list[dict[str, Any]]
    """The prompt as the data set has it, without what the environment says."""
    observation: str | None = None
    """What the environment says when it is reset, which stands at the end of the prompt; None: nothing."""
    failure: str | None = None
    """Why it could not be reset, in words that continue a sentence which begins with its name."""


@dataclass(frozen=True)
class Episode:
    """What came of the environment of a completion."""

    reward: str
    """Name of the environment's reward."""
    steps: tuple[tuple[int, float], ...] = ()
    """Rewards of turns: the number of sampled tokens up to the end of the turn, and the reward."""
    total: float | None = None
    """The reward of the completion as a whole, None where the environment gives none."""
    state: dict[str, Any] | None = None
    """The object as it was at the end, see `workers/snapshots.py`; None where it failed."""
    failure: str | None = None
    """Why the environment failed, in words that continue a sentence which begins with its name."""
