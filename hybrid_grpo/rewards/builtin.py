"""The reward functions that a configuration names without a path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Builtin:
    """Where a built-in reward function is defined, and how it may be called."""

    place: str
    """`module:function`; the module is imported by the process that calls the function."""
    called: Literal["process", "thread", "inline"] = "process"
    """Where it runs with `isolation: auto`. `thread` is for functions that hold a model. `inline` runs in the rank
    itself, on a whole group at once: for functions that are fast, cannot hang and judge each row by itself."""


_RULES, _TEXT = "hybrid_grpo.rewards.rules:", "hybrid_grpo.rewards.text:"
_MATHS = "hybrid_grpo.rewards.maths.reward:"

BUILTINS: dict[str, Builtin] = {
    "exact_match": Builtin(_RULES + "exact_match", called="inline"),
    "numeric_answer": Builtin(_MATHS + "numeric_answer", called="inline"),
    "format_regex": Builtin(_RULES + "format_regex"),
    "length_penalty": Builtin(_RULES + "length_penalty", called="inline"),
    "repetition_penalty": Builtin(_RULES + "repetition_penalty", called="inline"),
    "letters_in_place": Builtin(_RULES + "letters_in_place", called="inline"),
    "format_tags": Builtin(_RULES + "format_tags", called="inline"),
    "multiple_choice": Builtin(_TEXT + "multiple_choice", called="inline"),
    "language_penalty": Builtin(_TEXT + "language_penalty", called="inline"),
    "word_repetition_penalty": Builtin(_RULES + "word_repetition_penalty", called="inline"),
    "length_target": Builtin(_RULES + "length_target", called="inline"),
    "cosine_length": Builtin(_RULES + "cosine_length"),
    "countdown": Builtin("hybrid_grpo.rewards.countdown:countdown", called="inline"),
    "math_answer": Builtin(_MATHS + "math_answer"),
    "reward_model": Builtin("hybrid_grpo.rewards.models.reward:reward_model", called="thread"),
    "code_tests": Builtin("hybrid_grpo.rewards.code.reward:code_tests"),
    "remote": Builtin("hybrid_grpo.rewards.remote.client:remote"),
}
"""By the name that a configuration uses."""
