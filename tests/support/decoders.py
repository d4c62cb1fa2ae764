"""`generate` and its fallback, which here take the callbacks as further arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from hybrid_grpo.generation import Callbacks, fallback, loop

CALLBACKS = {field.name for field in fields(Callbacks)}


def _flat(decoder: Callable[..., Any]) -> Callable[..., Any]:
    def call(*task: Any, **arguments: Any) -> Any:
        called = {name: arguments.pop(name) for name in CALLBACKS & arguments.keys()}
        return decoder(*task, Callbacks(**called) if called else None, **arguments)

    return call


generate, generate_by_transformers = _flat(loop.generate), _flat(fallback.generate)
