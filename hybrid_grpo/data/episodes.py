"""Records of how an environment begins and ends. Imports no torch."""

from dataclasses import dataclass
from typing import Any

PLACE = "\ufffc"
"""Stands for a picture in a text: Unicode's character for objects."""


@dataclass(frozen=True)
class Observation:
    """What a tool, an environment or a user says: text with pictures in it."""

    text: str
    """Has a `PLACE` for each picture."""
    pictures: tuple[bytes, ...] = ()
    """The files of the pictures, in order."""


@dataclass(frozen=True)
class Opening:
    """The start of a prompt's environment, the same for all completions of the prompt."""

    seed: int
    """Seed for `random`, set before the environment is created and reset."""
    text: str | list[dict[str, Any]]
    """The prompt as it is in the data set, without the observation."""
    observation: Observation | None = None
    """What the environment says when it is reset; None if it says nothing. It is appended to the prompt."""
    failure: str | None = None
    """Why the reset failed, as the rest of a sentence that begins with the environment's name; None if it succeeded."""


@dataclass(frozen=True)
class Part:
    """What one of an episode's rewards is for: the turns of a role, or all that was sampled up to a turn."""

    role: str
    """Rewards of a role are compared with each other."""
    reward: float
    spans: tuple[tuple[int, int, float], ...]
    """Begins and ends among the sampled tokens, ascending, and the weight of the reward there: tokens with several
    rewards get their mean."""


@dataclass(frozen=True)
class Episode:
    """The outcome of a completion's environment."""

    reward: str
    """Name of the environment's reward."""
    steps: tuple[tuple[int, float], ...] = ()
    """For each turn with a reward, the number of sampled tokens up to the end of the turn, and the reward."""
    total: float | None = None
    """The reward of the completion as a whole, the mean if it has `parts`; None if the environment gives none."""
    state: dict[str, Any] | None = None
    """The attributes of the environment at the end, see `distributed/workers/snapshots.py`; None if it failed."""
    failure: str | None = None
    """Why the environment failed, as the rest of a sentence that begins with its name; None if it did not."""
    parts: tuple[Part, ...] = ()
    """What has a reward of its own; empty if one reward is for all."""
    chats: tuple[tuple[dict[str, Any], ...], ...] = ()
    """The messages of an agent's histories but the last, the prompt included."""
