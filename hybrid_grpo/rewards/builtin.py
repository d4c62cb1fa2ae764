"""The reward functions that a configuration names without a path."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Builtin:
    """Where a built-in is, and how it may be called."""

    place: str
    """`module:function`; imported where it is called."""
    trusted: bool = False
    """It is fast, cannot hang and looks at each row by itself: the rank itself calls it, with a group at once."""


_RULES = "hybrid_grpo.rewards.rules:"

BUILTINS: dict[str, Builtin] = {
    "exact_match": Builtin(_RULES + "exact_match", trusted=True),
    "numeric_answer": Builtin(_RULES + "numeric_answer", trusted=True),
    "format_regex": Builtin(_RULES + "format_regex"),
    "length_penalty": Builtin(_RULES + "length_penalty", trusted=True),
    "repetition_penalty": Builtin(_RULES + "repetition_penalty", trusted=True),
    "letters_in_place": Builtin(_RULES + "letters_in_place", trusted=True),
    "remote": Builtin("hybrid_grpo.rewards.remote:remote"),
}
"""By the name that a configuration gives."""
