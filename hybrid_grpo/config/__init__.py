"""Defines and reads the settings, and defines `UserError`, the error that reports users' mistakes.

`train.py` composes the configuration of training, and `commands.py` the configuration of every other command; the
sections have their own files. Nothing here imports torch or transformers, so a wrong setting is reported before any
model loads. The other packages implement what the settings do.

The names in everything.py are imported on first use, since pydantic takes its time, and processes that call users'
functions only need the errors.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_grpo.config.everything import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module hybrid_grpo.config has no attribute {name}")
    return getattr(import_module("hybrid_grpo.config.everything"), name)
