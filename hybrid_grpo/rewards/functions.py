"""From an entry of `rewards` to a function that can be called, and from what it returns to values.

The convention is TRL's, so that its functions run unchanged:

    f(prompts, completions, completion_ids=..., **dataset_columns, **kwargs) -> list[float | None]

Every input is a list with one element per row; everything is given by name. A function without **kwargs is given
only what its signature names. Chat prompts are lists of messages, and so are their completions (one message of the
assistant). None means that the function does not apply to the row. Of TRL's further arguments `trainer_state` has the
`global_step`, and what is given to `log_extra` and `log_metric` is stored with the completions.

verl's convention is known by its argument `solution_str`, and called for one row at a time:

    compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}

Process rewards: in place of a number a function may return the rewards of a completion's steps, a list of pairs
(text, reward), the pieces of the completion's text from its beginning on, or (end, reward), where `end` counts the
completion's tokens up to the end of the step.

This runs in the process that calls the function, which needs no torch.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import reprlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

from hybrid_grpo.config import RewardConfig, reward_name
from hybrid_grpo.config.errors import UserError, did_you_mean
from hybrid_grpo.config.importing import describe, functions_of, import_place
from hybrid_grpo.rewards.builtin import BUILTINS
from hybrid_grpo.rewards.rules import completion_texts

INPUTS = ("prompts", "completions", "completion_ids")
"""What every reward function can ask for, beside the columns of the data set."""
CONTEXT = ("trainer_state", "log_extra", "log_metric")
"""What TRL gives beside them."""

_LONGEST_TRACEBACK = 20_000  # characters
_LARGEST = 1e15  # of a reward: what is made of it, gradients and their squares in float32, stays finite
_EXPECTED = f"a finite number (at most {_LARGEST:g} in size)"

Inputs = dict[str, list[Any]]
"""By name, each with one element per row."""
Step = tuple[int, float]
"""End, in tokens, and reward of a step."""
Piece = tuple[str, float]
"""Text and reward of a step."""
Value = float | list[Step] | list[Piece] | None
"""Of one completion; None: the function does not apply."""


@dataclass(frozen=True)
class Failure:
    """Why a completion has no value of a function."""

    kind: Literal["raised", "invalid", "timeout", "died"]
    message: str
    """Reads on from the name of the function; one line."""
    traceback: str = ""


@dataclass(frozen=True)
class RewardCall:
    """One call of a function."""

    inputs: Inputs
    lengths: list[int]
    """Tokens of the completion of every row."""
    step: int = 0
    """Of the run."""

    def rows(self, rows: list[int]) -> RewardCall:
        """The same of some of the rows."""
        inputs = {name: [values[row] for row in rows] for name, values in self.inputs.items()}
        return RewardCall(inputs, [self.lengths[row] for row in rows], self.step)


@dataclass(frozen=True)
class Reply:
    """What came of it."""

    values: list[Value]
    """One per row; None also where the function failed."""
    failures: list[Failure | None]
    """One per row."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """By name, one per row: what the function wants to be stored with the completions. What JSON can hold."""
    spent: bool = False
    """The process has run out of memory: another should make the next call."""
    whole: bool = False
    """The failure is of the call as a whole: some of its rows may be without fault."""


def failed(failure: Failure, rows: int, *, spent: bool = False) -> Reply:
    """A call that failed as a whole."""
    return Reply([None] * rows, [failure] * rows, spent=spent, whole=rows > 1)


@dataclass(frozen=True)
class Interface:
    """What one needs to know of a function to call it."""

    required: list[str]
    """Parameters without a default that `kwargs` does not give."""
    accepted: list[str] | None
    """Parameters that can be given by name; None: any (**kwargs)."""
    is_async: bool
    batch_size: int | Literal["group"]
    """Completions of one call."""
    instead: dict[str, str] = field(default_factory=dict)
    """By required parameter, the column that can stand in for it."""
    settings: list[str] = field(default_factory=list)
    """Parameters that only `kwargs` gives, whatever columns are called."""

    def accepts(self, name: str) -> bool:
        """Whether the function can be given an input or a column of this name."""
        return name not in self.settings and (self.accepted is None or name in self.accepted)


@dataclass(frozen=True)
class Function:
    """A reward function and its settings, in the process that calls it."""

    name: str
    function: Callable[..., Any]
    """With its fixed keyword arguments."""
    interface: Interface
    file: str | None
    """Where it is written."""

    def __call__(self, inputs: Inputs, context: dict[str, Any] | None = None) -> Any:
        """Call the function with those of the inputs that it accepts; each call gets lists of its own."""
        given = {name: list(values) for name, values in inputs.items()} | (context or {})
        return self.function(**{name: value for name, value in given.items() if self.interface.accepts(name)})

    def score(self, call: RewardCall) -> Reply:
        """Call it, and check what it returns; never raises what the function does."""
        extra: dict[str, Any] = {}
        try:
            result = self(call.inputs, self._context(call, extra))
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            return self._reply(result, call, extra)
        except BaseException as error:  # a SystemExit of the function is no reason to end the process
            return self._raised(error, call)

    async def score_async(self, call: RewardCall) -> Reply:
        """The same, of an `async def` function."""
        extra: dict[str, Any] = {}
        try:
            return self._reply(await self(call.inputs, self._context(call, extra)), call, extra)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return self._raised(error, call)

    def _context(self, call: RewardCall, extra: dict[str, Any]) -> dict[str, Any]:
        rows = len(call.lengths)
        state = SimpleNamespace(global_step=call.step)
        return {
            name: value
            for name, value in (
                ("trainer_state", state),
                ("log_extra", lambda column, values: extra.update({str(column): list(values)})),
                ("log_metric", lambda name, value: extra.update({str(name): [float(value)] * rows})),
            )
            if self.interface.accepts(name)
        }

    def _raised(self, error: BaseException, call: RewardCall) -> Reply:
        trace = "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:]
        failure = Failure("raised", f"raised {describe(error, self.file)}", trace)
        return failed(failure, len(call.lengths), spent=isinstance(error, MemoryError))

    def _reply(self, result: Any, call: RewardCall, extra: dict[str, Any]) -> Reply:
        rows = len(call.lengths)
        result = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(result, list | tuple):
            return failed(Failure("invalid", f"returned a {type(result).__name__}, expected a list of {rows}"), rows)
        if len(result) != rows:
            return failed(Failure("invalid", f"returned {len(result)} values, expected {rows}"), rows)
        values: list[Value] = []
        failures: list[Failure | None] = []
        for value, length in zip(result, call.lengths, strict=True):
            try:
                values.append(_checked(value, length))
                failures.append(None)
            except ValueError as error:
                values.append(None)
                failures.append(Failure("invalid", f"returned {reprlib.repr(value)}: {error}"))
        stored = {name: [_plain(v) for v in column] for name, column in extra.items() if len(column) == rows}
        return Reply(values, failures, stored)


async def _awaited(result: Any) -> Any:
    return await result


def _checked(value: Any, length: int) -> Value:
    """The value as a float, None or steps; ValueError says what it should be."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return _steps(value, length)
    number = _reward(value)
    if number is None:
        raise ValueError(f"return {_EXPECTED}, or None where it does not apply")
    return number


def _steps(pairs: Any, length: int) -> list[Step] | list[Piece]:
    steps: list[Any] = []
    for pair in pairs:
        step = _step(pair)
        if step is None or not _follows(steps[-1][0] if steps else None, step[0], length):
            raise ValueError(
                f"return {_EXPECTED}, None, or pairs: (text, reward) of the completion's pieces, or (end, reward) with"
                f" ends rising within 1 to {length}, the tokens it has"
            )
        steps.append(step)
    return steps


def _follows(before: int | str | None, end: int | str, length: int) -> bool:
    """Whether a step can come behind another, or be the first one."""
    if isinstance(end, str):
        return not isinstance(before, int)
    return not isinstance(before, str) and (before or 0) < end <= length


def _step(pair: Any) -> tuple[int | str, float] | None:
    """Where a step ends, or its text, and its reward; None where a pair is no such thing."""
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return None
    end, reward = pair[0], _reward(pair[1])
    if reward is None or isinstance(end, bool):
        return None
    if isinstance(end, str):
        return end, reward
    return (int(end), reward) if hasattr(end, "__index__") else None


def _reward(value: Any) -> float | None:
    number = _number(value)
    return None if number is None or abs(number) > _LARGEST else number


def _number(value: Any) -> float | None:
    # float() also reads text; a reward given as text is a mistake.
    try:
        number = float(value) if hasattr(value, "__float__") or hasattr(value, "__index__") else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def _plain(value: Any) -> Any:
    """What JSON can hold: numbers and text as they are, the rest as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    number = _number(value)
    return str(value) if number is None else number


def load_function(config: RewardConfig, entry: str) -> Function:
    """Find the function of an entry, named `entry` in messages, and check its `kwargs` against its signature.

    Raises:
        UserError: the entry names nothing that can be imported and called, or its `kwargs` do not fit.
    """
    given = config.function
    return bind(_find(given, f"{entry}.function {given}") if isinstance(given, str) else given, config, entry)


def bind(found: Callable[..., Any], config: RewardConfig, entry: str) -> Function:
    """A callable with the settings of its entry; see `load_function`."""
    code = getattr(inspect.unwrap(found), "__code__", None)
    is_async = any(map(inspect.iscoroutinefunction, (found, inspect.unwrap(found), type(found).__call__)))
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        raise UserError(
            f"{entry}.function {config.function} has no signature that Python can read: wrap it in a `def`"
        ) from None
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in variadic}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    accepted = None if takes_any else sorted(named)
    batch_size = getattr(found, "batch_size", 1) if config.batch_size == "auto" else config.batch_size
    if batch_size != "group" and not (isinstance(batch_size, int) and batch_size >= 1):
        raise UserError(f"{entry}.function {config.function} asks for batch_size {batch_size!r}: group, or 1 or more")
    function: Callable[..., Any] = partial(found, **config.kwargs)
    instead = {}
    if "solution_str" in named:
        function, instead = _by_rows(function, is_async), {"ground_truth": "reward_model"}
        needed = (needed - {"solution_str", "data_source", "extra_info"}) | {"ground_truth"}
        columns = {"data_source", "extra_info"} if takes_any else set()
        accepted = sorted(
            (named - {"solution_str"}) | {"completions", "reward_model", "ground_truth", "log_extra"} | columns
        )
    only_named = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - set(CONTEXT)
    settings = only_named if config.function in BUILTINS else set()
    interface = Interface(
        required=sorted(needed - config.kwargs.keys() - set(CONTEXT)),
        accepted=accepted,
        is_async=is_async,
        batch_size=batch_size,
        instead=instead,
        settings=sorted(settings),
    )
    _check_kwargs(config, None if takes_any else named, entry)
    loaded = Function(reward_name(config), function, interface, code.co_filename if code else None)
    if config.function in BUILTINS:
        _check_builtin(loaded, entry)
    return loaded


def _by_rows(compute_score: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
    """A function of verl's convention as one of TRL's."""
    parameters = inspect.signature(compute_score).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}

    def start(completions: Any, columns: Inputs) -> list[Any]:
        truths = columns.pop("ground_truth", None) or [model["ground_truth"] for model in columns["reward_model"]]
        columns.pop("reward_model", None)
        results = []
        for row, text in enumerate(completion_texts(completions)):
            given = {"data_source": None, "extra_info": None} | {name: v[row] for name, v in columns.items()}
            given = {name: value for name, value in given.items() if takes_any or name in names}
            results.append(compute_score(solution_str=text, ground_truth=truths[row], **given))
        return results

    def finish(results: list[Any], log_extra: Callable[[str, list[Any]], None]) -> list[Any]:
        details = [result if isinstance(result, dict) else {"score": result} for result in results]
        for name in {name: None for detail in details for name in detail if name != "score"}:
            log_extra(name, [detail.get(name) for detail in details])
        return [detail["score"] for detail in details]

    def function(completions: Any, log_extra: Any, **columns: Any) -> list[Any]:
        return finish(start(completions, columns), log_extra)

    async def async_function(completions: Any, log_extra: Any, **columns: Any) -> list[Any]:
        return finish(await asyncio.gather(*start(completions, columns)), log_extra)

    return async_function if is_async else function


def _check_kwargs(config: RewardConfig, known: set[str] | None, entry: str) -> None:
    name = reward_name(config)
    for kwarg in config.kwargs:
        if kwarg in INPUTS:
            raise UserError(f"{entry}.kwargs {kwarg}: {name} is given {kwarg} of the rollout: leave it out")
        if known is not None and kwarg not in known:
            hint = did_you_mean(kwarg, known - {*INPUTS, *CONTEXT})
            raise UserError(f"{entry}.kwargs {kwarg}: {name} has no such parameter: {hint}")


def _check_builtin(function: Function, entry: str) -> None:
    """A built-in checks its settings before it looks at rows: a call with no rows checks them now."""
    for name in sorted(set(function.interface.settings).intersection(function.interface.required)):
        raise UserError(f"{entry}.kwargs lacks {name}, which {function.name} needs: give kwargs: {{{name}: ...}}")
    try:
        result = function({name: [] for name in function.interface.required})
        if inspect.isawaitable(result):
            asyncio.run(_awaited(result))
    except Exception as error:
        raise UserError(f"{entry}.kwargs do not suit {function.name}: {describe(error, None)}") from error


def _find(spec: str, setting: str) -> Callable[..., Any]:
    place, colon, attribute = spec.rpartition(":")
    if not colon:
        if spec not in BUILTINS:
            raise UserError(
                f"{setting} is no built-in: {did_you_mean(spec, BUILTINS)}; one of your own is given as"
                " path/to/file.py:function or package.module:function"
            )
        place, _, attribute = BUILTINS[spec].place.rpartition(":")
    module = import_place(place, setting)
    function = getattr(module, attribute, None)
    if not callable(function):
        what = "is not a function" if hasattr(module, attribute) else "does not exist"
        name = attribute or "the name behind the colon"
        raise UserError(f"{setting}: {name} {what} in {place}: {did_you_mean(attribute, functions_of(module))}")
    return function
