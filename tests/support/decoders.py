"""`generate` and its fallback, which here take the callbacks as further arguments, and what their tests look at."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain
from typing import Any

import pytest

from hybrid_grpo.generation import Callbacks, fallback, loop

CALLBACKS = {field.name for field in fields(Callbacks)}


def _flat(decoder: Callable[..., Any]) -> Callable[..., Any]:
    def call(*task: Any, **arguments: Any) -> Any:
        called = {name: arguments.pop(name) for name in CALLBACKS & arguments.keys()}
        return decoder(*task, Callbacks(**called) if called else None, **arguments)

    return call


generate, generate_by_transformers = _flat(loop.generate), _flat(fallback.generate)


def tokens(groups: Any) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def assert_alike(groups: Any, others: Any, gap: float = 2e-5, *, sidecars: bool = True) -> None:
    """Completions are the same, but for the rounding of log-probabilities."""
    for mine, theirs in zip(chain(*groups), chain(*others), strict=True):
        assert (mine.token_ids, mine.finish, mine.text) == (theirs.token_ids, theirs.finish, theirs.text)
        assert mine.observations == theirs.observations and (mine.sidecars == theirs.sidecars or not sidecars)
        assert mine.logp == pytest.approx(theirs.logp, abs=gap)


@contextmanager
def shapes_of_forwards(model: Any) -> Iterator[list[tuple[int, ...]]]:
    """Yield a list, to which the shape of the tokens of each forward is added."""
    shapes: list[tuple[int, ...]] = []
    note = lambda _, __, kwargs: shapes.append(tuple(kwargs["input_ids"].shape))  # noqa: E731
    with model.register_forward_pre_hook(note, with_kwargs=True):
        yield shapes
