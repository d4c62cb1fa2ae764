"""Settings of the tools that a model calls between its turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

from pydantic import model_serializer, model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.fields import SECTION, Function, function_text
from hybrid_grpo.config.secrets import refuse_masked


@dataclass(frozen=True, config=SECTION)
class ToolConfig:
    """A tool that the model can call."""

    function: Function
    """`calculator` or another built-in, `path/to/file.py:function`, or `package.module:function`; in Python also the
    function itself."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments that are the same in every call; the model does not see them. An argument that has the name of a secret
    is written as *** wherever settings are written."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, entry: Any) -> Any:
        is_function = isinstance(entry, str | Callable) and not isinstance(entry, cls)
        return {"function": entry.strip() if isinstance(entry, str) else entry} if is_function else entry

    @model_validator(mode="after")
    def _check(self) -> ToolConfig:
        refuse_masked("rollout.tools", self.kwargs)
        return self

    @model_serializer
    def _write(self) -> str | dict[str, Any]:
        name = function_text(self.function)
        return {"function": name, "kwargs": self.kwargs} if self.kwargs else name
