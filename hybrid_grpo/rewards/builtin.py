"""The reward functions that a configuration names without a path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Builtin:
    """Where a built-in is, and how it may be called."""

    place: str
    """`module:function`; imported where it is called."""
    trusted: bool = False
    """It is fast, cannot hang and looks at each row by itself: the rank itself calls it, with a group at once."""
    isolation: Literal["process", "none"] = "process"
    """What `isolation: auto` means for one that is not trusted; `none` for those that hold a model."""


_RULES = "hybrid_grpo.rewards.rules:"
_TEXT = "hybrid_grpo.rewards.text:"

BUILTINS: dict[str, Builtin] = {
    "exact_match": Builtin(_RULES + "exact_match", trusted=True),
    "numeric_answer": Builtin(_RULES + "numeric_answer", trusted=True),
    "format_regex": Builtin(_RULES + "format_regex"),
    "length_penalty": Builtin(_RULES + "length_penalty", trusted=True),
    "repetition_penalty": Builtin(_RULES + "repetition_penalty", trusted=True),
    "letters_in_place": Builtin(_RULES + "letters_in_place", trusted=True),
    "format_tags": Builtin(_TEXT + "format_tags", trusted=True),
    "multiple_choice": Builtin(_TEXT + "multiple_choice", trusted=True),
    "language_penalty": Builtin(_TEXT + "language_penalty", trusted=True),
    "word_repetition_penalty": Builtin(_TEXT + "word_repetition_penalty", trusted=True),
    "length_target": Builtin(_TEXT + "length_target", trusted=True),
    "cosine_length": Builtin(_TEXT + "cosine_length"),
    "countdown": Builtin("hybrid_grpo.rewards.countdown:countdown", trusted=True),
    "math_answer": Builtin("hybrid_grpo.rewards.maths:math_answer"),
    "reward_model": Builtin("hybrid_grpo.rewards.models:reward_model", isolation="none"),
    "code_tests": Builtin("hybrid_grpo.rewards.code:code_tests"),
    "remote": Builtin("hybrid_grpo.rewards.remote:remote"),
}
"""By the name that a configuration gives."""
