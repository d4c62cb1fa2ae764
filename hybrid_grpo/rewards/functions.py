"""From an entry of `rewards` to a function that can be called, and from its return value to checked rewards.

The convention is TRL's, so that functions written for TRL run unchanged:

    f(prompts, completions, completion_ids=..., **dataset_columns, **kwargs) -> list[float | None]

Every input is a list with one element per row, and everything is given by name. A function without **kwargs is given
only what its signature names. Chat prompts are lists of messages, and so are their completions (one message of the
assistant). None means that the function does not apply to the row. Of TRL's further arguments, `trainer_state` has the
`global_step`; what a function passes to `log_extra` and `log_metric` is stored with the completions.

verl's convention is recognized by the argument `solution_str`. Such a function is called for one row at a time:

    compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}

Process rewards: in place of a number a function may return a list of pairs, the rewards of a completion's steps. Pairs
are (text, reward), whose texts follow each other from the beginning of the completion; or, as process reward models
need it, (end, reward), where `end` is the number of completion tokens up to the end of the step.

This module runs in the process that calls the function, which needs no torch.
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
from hybrid_grpo.rewards.environments import Carried, restored
from hybrid_grpo.rewards.rules import completion_texts


@dataclass(frozen=True)
class Builtin:
    """Where a built-in reward function is defined, and how it may be called."""

    module: str
    """In this package; imported by the process that calls the function. The function has the built-in's name."""
    called: Literal["process", "thread", "inline"] = "process"
    """Where it runs with `isolation: auto`. `thread` is for functions that hold a model. `inline` runs in the rank
    itself, on a whole group at once: for functions that are fast, cannot hang and judge each row by itself."""


BUILTINS: dict[str, Builtin] = {
    "exact_match": Builtin("rules", "inline"),
    "numeric_answer": Builtin("maths.answers", "inline"),
    "format_regex": Builtin("rules"),
    "repetition_penalty": Builtin("rules", "inline"),
    "letters_in_place": Builtin("rules", "inline"),
    "format_tags": Builtin("rules", "inline"),
    "multiple_choice": Builtin("text", "inline"),
    "language_penalty": Builtin("text", "inline"),
    "countdown": Builtin("countdown", "inline"),
    "math_answer": Builtin("maths.answers"),
    "reward_model": Builtin("models.reward_model", "thread"),
    "code_tests": Builtin("code.code_tests"),
    "remote": Builtin("remote.client"),
}
"""The reward functions that a configuration names without a path."""

INPUTS = ("prompts", "completions", "completion_ids")
"""What every reward function can ask for, beside the columns of the data set."""
ENVIRONMENTS = "environments"
"""TRL's input with the environments of completions, as they were at the end; there with `rollout.environment`."""
CONTEXT = ("trainer_state", "log_extra", "log_metric")
"""Further arguments that TRL gives to functions that ask for them."""

_LONGEST_TRACEBACK = 20_000  # characters
_LARGEST = 1e15  # largest reward: gradients that are computed from it, and their squares, stay finite in float32
_EXPECTED = f"a finite number (at most {_LARGEST:g} in size)"

_MOST_COLUMNS, _LONGEST_NAME, _LONGEST_TEXT = 64, 100, 10_000
"""Of what a function stores with completions: columns, and characters of a name and of a value."""
_LARGEST_WHOLE = 2**63

Inputs = dict[str, list[Any]]
"""Arguments of a function by name, each with one element per row."""
TextStep = tuple[str, float]
"""Text and reward of a step."""
TokenStep = tuple[int, float]
"""End, in tokens, and reward of a step; a `RewardStep` of data/batch.py, without torch."""
Value = float | list[TokenStep] | list[TextStep] | None
"""What a function returns for one completion; None where it does not apply."""


Kind = Literal["raised", "invalid", "timeout", "died"]
"""What went wrong."""
ReplyForm = Literal["rewards", "text", "event"]
"""What is returned: rewards, what a tool or a user says, or what came of an order to an environment."""


@dataclass(frozen=True)
class Failure:
    """Why a function gave a completion no value."""

    kind: Kind
    message: str
    """One line that continues a sentence which begins with the function's name."""
    traceback: str = ""


@dataclass(frozen=True)
class RewardCall:
    """One call of a function."""

    inputs: Inputs
    lengths: list[int]
    """Number of tokens of every row's completion."""
    step: int = 0
    """Step of the run."""

    def rows(self, rows: list[int]) -> RewardCall:
        """The same call for some of the rows."""
        inputs = {name: [values[row] for row in rows] for name, values in self.inputs.items()}
        return RewardCall(inputs, [self.lengths[row] for row in rows], self.step)


@dataclass(frozen=True)
class Reply:
    """The result of one call of a function."""

    values: list[Value]
    """One per row; None also where the function failed."""
    failures: list[Failure | None]
    """One per row."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """By name, one per row: what the function wants stored with the completions, in types that JSON has."""
    spent: bool = False
    """The process has run out of memory: another process should make the next call."""
    whole: bool = False
    """The call failed as a whole: some of its rows may be without fault."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each time that the function ran, in seconds by `time.perf_counter` of the rank."""


def failed(failure: Failure, rows: int, *, spent: bool = False) -> Reply:
    """The reply of a call that failed as a whole."""
    return Reply([None] * rows, [failure] * rows, spent=spent, whole=rows > 1)


@dataclass(frozen=True)
class Interface:
    """How a function is to be called."""

    required: list[str]
    """Parameters without a default that `kwargs` does not give."""
    accepted: list[str] | None
    """Parameters that can be given by name; None where any can (**kwargs)."""
    is_async: bool
    batch_size: int | Literal["group", "all"]
    """Completions of one call. `all`: all of a rank, possibly none, called by all ranks at the same time."""
    instead: dict[str, str] = field(default_factory=dict)
    """By required parameter, the column that can take its place."""
    settings: list[str] = field(default_factory=list)
    """Parameters that only `kwargs` gives, even if the data has a column of the same name."""
    schema: dict[str, Any] | None = None
    """What a model is told of a tool; None for a reward function. Of an environment: whether it `steps`, whether its
    reset is `silent`, and what a model is told of its methods, `tools`."""

    replies: ReplyForm = "rewards"

    def accepts(self, name: str) -> bool:
        """Whether the function can be given an input or a column of this name."""
        return name not in self.settings and (self.accepted is None or name in self.accepted)


@dataclass(frozen=True)
class Function:
    """A reward function and its settings, in the process that calls it."""

    name: str
    function: Callable[..., Any]
    """The function with its fixed keyword arguments."""
    interface: Interface
    file: str | None
    """File in which the function is written."""

    def __call__(self, inputs: Inputs, context: dict[str, Any] | None = None) -> Any:
        """Call the function with the inputs that it accepts."""
        given = inputs | (context or {})
        given = {name: value for name, value in given.items() if self.interface.accepts(name)}
        if ENVIRONMENTS in given:  # it may also be a column of the data
            given[ENVIRONMENTS] = [restored(e) if isinstance(e, Carried) else e for e in given[ENVIRONMENTS]]
        return self.function(**given)

    def score(self, call: RewardCall) -> Reply:
        """Call the function and check what it returns; what the function raises becomes a failure."""
        extra: dict[str, list[Any]] = {}
        try:
            result = self(call.inputs, _context(call, extra))
            return _checked_reply(asyncio.run(result) if inspect.iscoroutine(result) else result, call, extra)
        except BaseException as error:  # a SystemExit of the function is no reason to end the process
            return self._raised(error, call)

    async def score_async(self, call: RewardCall) -> Reply:
        """`score` for an `async def` function."""
        extra: dict[str, list[Any]] = {}
        try:
            return _checked_reply(await self(call.inputs, _context(call, extra)), call, extra)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return self._raised(error, call)

    def _raised(self, error: BaseException, call: RewardCall) -> Reply:
        trace = "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:]
        failure = Failure("raised", f"raised {describe(error, self.file)}", trace)
        return failed(failure, len(call.lengths), spent=isinstance(error, MemoryError))


def _context(call: RewardCall, extra: dict[str, list[Any]]) -> dict[str, Any]:
    """TRL's further arguments; what the function logs is written to `extra`."""
    return {
        "trainer_state": SimpleNamespace(global_step=call.step),
        "log_extra": lambda column, values: extra.update({str(column): list(values)}),
        "log_metric": lambda name, value: extra.update({str(name): [float(value)] * len(call.lengths)}),
    }


def _checked_reply(result: Any, call: RewardCall, extra: dict[str, list[Any]]) -> Reply:
    """What a function returned as a reply; a row whose value is not a reward has failed."""
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
            values.append(checked(value, length))
            failures.append(None)
        except ValueError as error:
            values.append(None)
            failures.append(Failure("invalid", f"returned {reprlib.repr(value)}: {error}"))
    return Reply(values, failures, stored(extra, rows))


def checked(value: Any, length: int) -> Value:
    """A function's value for a completion of `length` tokens as a float, None or steps; a ValueError says what it
    should be."""
    if isinstance(value, list | tuple):
        return _checked_steps(value, length)
    number = finite(value)
    if number is None and value is not None:
        raise ValueError(f"return {_EXPECTED}, or None where it does not apply")
    return number


def _checked_steps(pairs: Any, length: int) -> list[TokenStep] | list[TextStep]:
    steps: list[Any] = []
    last_end = 0
    end: Any
    for pair in pairs:
        end, value = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        reward = finite(value)
        is_text = isinstance(end, str)
        if hasattr(end, "__index__") and not isinstance(end, bool):
            end = int(end)
        in_order = is_text or (type(end) is int and last_end < end <= length)
        mixed = bool(steps) and is_text != isinstance(steps[0][0], str)
        if reward is None or not in_order or mixed:
            raise ValueError(
                f"return {_EXPECTED}, None, or pairs: (text, reward) with texts that make up the completion, or"
                f" (end, reward) with ends rising within 1 to {length}, the tokens it has"
            )
        steps.append((end, reward))
        last_end = 0 if is_text else end
    return steps


def finite(value: Any, largest: float = _LARGEST) -> float | None:
    """The value as a finite float of at most this size; None where it is none."""
    # float() would also read text, but a reward that is given as text is a mistake.
    try:
        number = float(value) if hasattr(value, "__float__") or hasattr(value, "__index__") else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) and abs(number) <= largest else None


def stored(extra: dict[str, list[Any]], rows: int) -> dict[str, list[Any]]:
    """What a function wants stored with completions, in plain values. Columns of another length are left out, as are
    those beyond `_MOST_COLUMNS`; long text is cut."""
    columns = [(str(name)[:_LONGEST_NAME], column) for name, column in extra.items() if len(column) == rows]
    return {_readable(name): [_plain(v) for v in column] for name, column in columns[:_MOST_COLUMNS]}


def _plain(value: Any) -> Any:
    """A value that JSON can hold: numbers and text as they are, anything else as text."""
    if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < _LARGEST_WHOLE):
        return value
    number = None if isinstance(value, str) else finite(value, math.inf)
    return _readable(str(value)[:_LONGEST_TEXT]) if number is None else number


def _readable(text: str) -> str:
    """Text without halves of surrogate pairs, which no file takes."""
    return text.encode(errors="replace").decode()


def load_function(config: RewardConfig, entry: str) -> Function:
    """Find the function of an entry of `rewards` and check its `kwargs`; `entry` names the entry in messages.

    Raises UserError where the entry names nothing that can be imported and called, or where its `kwargs` do not fit.
    """
    found = config.function
    return bind(found if callable(found) else _find(found, f"{entry}.function {found}"), config, entry)


def bind(found: Callable[..., Any], config: RewardConfig, entry: str) -> Function:
    """A callable with the settings of its entry; see `load_function`."""
    name, setting = reward_name(config), f"{entry}.function {config.function}"
    plain = inspect.unwrap(found)
    is_async = any(map(inspect.iscoroutinefunction, (found, plain, type(found).__call__)))
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        raise UserError(f"{setting} has no signature that Python can read: wrap it in a `def`") from None
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    batch_size = getattr(found, "batch_size", 1) if config.batch_size == "auto" else config.batch_size
    if batch_size != "group" and not (isinstance(batch_size, int) and batch_size >= 1):
        raise UserError(f"{setting} asks for batch_size {batch_size!r}: group, or 1 or more")
    is_builtin = isinstance(config.function, str) and config.function in BUILTINS
    for kwarg in config.kwargs:
        if kwarg in INPUTS:
            raise UserError(f"{entry}.kwargs {kwarg}: {name} is given {kwarg} of the rollout: leave it out")
        if kwarg not in named and (is_builtin or not takes_any):
            hint = did_you_mean(kwarg, named - {*INPUTS, *CONTEXT})
            raise UserError(f"{entry}.kwargs {kwarg}: {name} has no such parameter: {hint}")
    function: Callable[..., Any] = partial(found, **config.kwargs)
    accepted, instead = named, {}
    if "solution_str" in named:  # verl's convention
        function, instead = _called_by_row(function, named, takes_any, is_async), {"ground_truth": "reward_model"}
        needed = (needed - {"solution_str", "data_source", "extra_info"}) | {"ground_truth"}
        accepted = (named - {"solution_str"}) | {"completions", "reward_model", "ground_truth", "log_extra"}
        accepted |= {"data_source", "extra_info"} if takes_any else set()
        takes_any = False
    settings = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - set(CONTEXT) if is_builtin else set()
    interface = Interface(
        sorted(needed - config.kwargs.keys() - set(CONTEXT)),
        None if takes_any else sorted(accepted),
        is_async,
        batch_size,
        instead,
        sorted(settings),
    )
    loaded = Function(name, function, interface, getattr(getattr(plain, "__code__", None), "co_filename", None))
    if is_builtin:
        _check_builtin(loaded, entry)
    return loaded


def _called_by_row(
    compute_score: Callable[..., Any], names: set[str], takes_any: bool, is_async: bool
) -> Callable[..., Any]:
    """A function of verl's convention as one of TRL's; `names` are its parameters."""

    def function(completions: Any, log_extra: Any, **columns: Any) -> Any:
        unknown = [None] * len(completions)
        columns = {"data_source": unknown, "extra_info": unknown, **columns}
        columns["solution_str"] = completion_texts(completions)
        if "ground_truth" not in columns:
            columns["ground_truth"] = [model["ground_truth"] for model in columns["reward_model"]]
        given = [name for name in columns if name in names or (takes_any and name != "reward_model")]
        rows = zip(*(columns[name] for name in given), strict=True)
        results = [compute_score(**dict(zip(given, row, strict=True))) for row in rows]
        return awaited(results, log_extra) if is_async else finished(results, log_extra)

    async def awaited(results: list[Any], log_extra: Any) -> list[Any]:
        return finished(await asyncio.gather(*results), log_extra)

    def finished(results: list[Any], log_extra: Any) -> list[Any]:
        details = [result if isinstance(result, dict) else {"score": result} for result in results]
        for name in {name: None for detail in details for name in detail if name != "score"}:
            log_extra(name, [detail.get(name) for detail in details])
        return [detail["score"] for detail in details]

    return function


def _check_builtin(function: Function, entry: str) -> None:
    """Check the settings of a built-in: a call with no rows does so, since it checks them before it looks at rows."""
    try:
        result = function({name: [] for name in function.interface.required})
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except Exception as error:
        raise UserError(f"{entry}.kwargs do not suit {function.name}: {describe(error, None)}") from error


def _find(spec: str, setting: str) -> Callable[..., Any]:
    """The function that a configuration names; `setting` begins the messages."""
    place, colon, attribute = spec.rpartition(":")
    if not colon:
        if spec not in BUILTINS:
            raise UserError(
                f"{setting} is not a built-in: {did_you_mean(spec, BUILTINS)}; one of your own is given as"
                " path/to/file.py:function or package.module:function"
            )
        place, attribute = f"hybrid_grpo.rewards.{BUILTINS[spec].module}", spec
    module = import_place(place, setting)
    function = getattr(module, attribute, None)
    if not callable(function):
        what = "is not a function" if hasattr(module, attribute) else "does not exist"
        name = attribute or "the name after the colon"
        raise UserError(f"{setting}: {name} {what} in {place}: {did_you_mean(attribute, functions_of(module))}")
    return function
