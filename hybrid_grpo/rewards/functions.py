"""Loads the reward function that an entry of `rewards` names, calls it, and checks its return value.

The convention is TRL's, so that functions written for TRL run unchanged; docs/rewards.md has the details:

    f(prompts, completions, completion_ids=..., **dataset_columns, **kwargs) -> list[float | None]

Process rewards: instead of a number, a function may return a list with one pair for each step of a completion. The
pairs are either (text, reward), where the texts of the steps follow each other from the beginning of the completion, or
(end, reward), where `end` is the number of completion tokens up to the end of the step.

This module runs in the process that calls the function, and needs no torch.
"""

import asyncio
import inspect
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, cast

import dill

from hybrid_grpo.config import RewardConfig, reward_name
from hybrid_grpo.config.errors import UserError, did_you_mean, type_of
from hybrid_grpo.config.user_code import describe, functions_of, import_place, refuse_bare_file
from hybrid_grpo.distributed.workers.calls import Call, Failure, Inputs, Interface, Reply, failed, finite, raised
from hybrid_grpo.distributed.workers.messages import stored
from hybrid_grpo.distributed.workers.snapshots import Snapshot, restored
from hybrid_grpo.rewards import verl


@dataclass(frozen=True)
class Builtin:
    """Where a built-in reward function is defined, and how it may be called."""

    module: str
    """Module of this package that defines a function with the built-in's name; only the calling process imports it."""
    called: Literal["process", "thread", "inline"] = "process"
    """Where the function runs with `isolation: auto`: in a `thread` if it holds a model; `inline`, that is in the rank
    itself and on a whole group at once, if it is fast, cannot hang and judges each row independently of the others."""
    needs: str = ""
    """Package that it imports when it is called; empty if it needs no other than this package does."""
    reads: str = ""
    """The form of the answers that it finds in completions, for the message that it has found none."""


BUILTINS: dict[str, Builtin] = {
    "exact_match": Builtin("rules", "inline"),
    "numeric_answer": Builtin(
        "maths.answers",
        "inline",
        reads="a number after #### or in \\boxed{}, or set kwargs last_number to true, which reads the last number",
    ),
    "format_regex": Builtin("rules"),
    "repetition_penalty": Builtin("rules", "inline"),
    "letters_in_place": Builtin("rules", "inline"),
    "format_tags": Builtin("rules", "inline"),
    "multiple_choice": Builtin("text", "inline"),
    "language_penalty": Builtin("text", "inline"),
    "gym_answer": Builtin("tasks.gym", needs="reasoning_gym"),
    "function_calls": Builtin("tasks.calls"),
    "math_answer": Builtin("maths.answers", reads="an answer in \\boxed{}, or after #### or `Answer:`"),
    "reward_model": Builtin("models.reward_model", "thread"),
    "code_tests": Builtin("code.code_tests"),
    "remote": Builtin("remote.client"),
    "judge": Builtin("remote.judge"),
}
"""The built-in reward functions, which a configuration names without a path."""
_GONE = {"countdown": "data.task gym/countdown has the puzzles, with a reward of its own"}
"""Names of earlier versions, and what takes their place."""

PICTURES = "completion_images"
"""The input with the pictures that answers between the turns of each completion showed."""
PROMPT_PICTURES = "prompt_images"
"""The input with the pictures of each prompt, whatever their column is called. Functions get it that name it."""
INPUTS = ("prompts", "completions", "completion_ids", PICTURES, PROMPT_PICTURES)
"""What every reward function can receive in addition to the columns of the data set."""
ENVIRONMENTS = "environments"
"""TRL's name for the input with each completion's environment in its final state; needs `rollout.environment`."""
CONTEXT = ("trainer_state", "log_extra", "log_metric")
"""Additional arguments that TRL passes to functions whose signature names them."""

_LARGEST = 1e15  # gradients computed from a reward of this size, and their squares, are finite in float32
_CHATS = (
    "The prompts are chats, so `completions` holds lists of messages, as in TRL: the text of one is"
    ' completion[-1]["content"]\n'
)
_TEXTS = "The prompts are texts, so `completions` holds texts, as in TRL, not messages with content\n"
_EXPECTED = f"a finite number (at most {_LARGEST:g} in size)"

TextStep = tuple[str, float]
"""Text and reward of a step."""
TokenStep = tuple[int, float]
"""End (in tokens) and reward of a step, like `RewardStep` of data/batch.py, a module that needs torch."""
RewardValue = float | list[TokenStep] | list[TextStep] | None
"""What a function returns for one completion; None if it does not apply."""


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward function in the process that calls it; implements `workers.calls.Callee`."""

    name: str
    function: Callable[..., Any]
    """The callable, to which the `kwargs` of its entry are already bound."""
    interface: Interface
    file: str | None
    """Source file of the function; None if unknown."""

    def __call__(self, inputs: Inputs, context: dict[str, Any] | None = None) -> Any:
        """Call the function with the inputs and context arguments that it accepts."""
        known = inputs | (context or {})
        arguments = {name: value for name, value in known.items() if self.interface.accepts(name)}
        if ENVIRONMENTS in arguments:  # it may also be a column of the data
            arguments[ENVIRONMENTS] = [restored(e) if isinstance(e, Snapshot) else e for e in arguments[ENVIRONMENTS]]
        return self.function(**arguments)

    def reply(self, call: Call) -> Reply:
        """Call the function and check what it returns; an exception becomes a failure."""
        extra: dict[str, list[Any]] = {}
        try:
            result = self(call.inputs, _context(call, extra))
            return _checked_reply(asyncio.run(result) if inspect.iscoroutine(result) else result, call, extra)
        except BaseException as error:  # including SystemExit, which must not end the process
            return self._raised(error, call)

    async def reply_async(self, call: Call) -> Reply:
        """Do the same as `reply`, for an `async def` function."""
        extra: dict[str, list[Any]] = {}
        try:
            return _checked_reply(await self(call.inputs, _context(call, extra)), call, extra)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return self._raised(error, call)

    def _raised(self, error: BaseException, call: Call) -> Reply:
        if isinstance(error, verl.AdapterError):
            return failed(Failure("invalid", str(error)), len(call.expected))
        hint = ""
        chats = any(isinstance(completion, list) for completion in call.inputs.get("completions", ()))
        if chats and isinstance(error, AttributeError | TypeError):
            hint = _CHATS
        elif not chats and re.search("string ind|'str' object has no attribute '(get|content)'", str(error)):
            hint = _TEXTS
        return raised(error, f"raised {describe(error, self.file)}", len(call.expected), hint)


class TrainerState(SimpleNamespace):
    """TRL's argument `trainer_state`, with the fields of `Call.state`."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has no {name} here: it has {', '.join(vars(self))}")


def _context(call: Call, extra: dict[str, list[Any]]) -> dict[str, Any]:
    """Return TRL's additional arguments; whatever the function logs is added to `extra`."""
    return {
        "trainer_state": TrainerState(**call.state),
        "log_extra": lambda column, values: extra.update({str(column): list(values)}),
        "log_metric": lambda name, value: extra.update({str(name): [float(value)] * len(call.expected)}),
    }


def _checked_reply(result: Any, call: Call, extra: dict[str, list[Any]]) -> Reply:
    """Convert a function's return value to a reply; a row whose value is not a valid reward counts as failed."""
    rows = len(call.expected)
    result = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(result, list | tuple):
        return failed(Failure("invalid", f"returned {type_of(result)}, expected a list of {rows}"), rows)
    if len(result) != rows:
        return failed(Failure("invalid", f"returned {len(result)} values, expected {rows}"), rows)
    values: list[RewardValue] = []
    failures: list[Failure | None] = []
    for value, length in zip(result, call.expected, strict=True):
        try:
            values.append(checked(value, length))
            failures.append(None)
        except ValueError as error:
            values.append(None)
            failures.append(Failure("invalid", f"returned {reprlib.repr(value)}: {error}"))
    return Reply(values, failures, stored(extra, rows) if extra else {})


def checked(value: Any, length: int) -> RewardValue:
    """Return the value for a completion of `length` tokens; raise ValueError unless it is a number, None or steps."""
    if isinstance(value, list | tuple):
        return _checked_steps(value, length)
    number = finite_reward(value)
    if number is None and value is not None:
        raise ValueError(f"return {_EXPECTED}, or None if the function does not apply")
    return number


def _checked_steps(pairs: Any, length: int) -> list[TokenStep] | list[TextStep]:
    steps: list[Any] = []
    last_end = 0
    end: Any
    for pair in pairs:
        end, value = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        reward = finite_reward(value)
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


def finite_reward(value: Any) -> float | None:
    """The value as a float, or None if it is not a valid reward."""
    return finite(value, _LARGEST)


@dataclass(frozen=True)
class RewardEntry:
    """An entry of `rewards` that worker processes load; implements `workers.calls.Entry`."""

    config: RewardConfig
    pickled: bytes | None = None
    """The function, by dill and with all that it refers to, if no module defines it."""

    @property
    def kwargs(self) -> dict[str, Any]:
        return self.config.kwargs

    def load(self, name: str) -> RewardFunction:
        if self.pickled is None:
            return load_function(self.config, name)
        try:
            function = dill.loads(self.pickled)
        except Exception as error:
            why = f"cannot be sent to a worker: {describe(error, None)}"
            raise UserError(f"{name}.function {why}: write it into a file, or set its isolation to none") from error
        return bind(function, self.config, name)

    def checked(self, value: Any, expected: int) -> RewardValue:
        return checked(value, expected)


def load_function(config: RewardConfig, entry: str) -> RewardFunction:
    """Find the function of an entry of `rewards` and check its `kwargs`; `entry` names the entry in messages. Raises
    UserError if the function cannot be imported or called, or does not accept these `kwargs`."""
    found = config.function
    return bind(found if callable(found) else _find(found, f"{entry}.function {found}"), config, entry)


def bind(found: Callable[..., Any], config: RewardConfig, entry: str) -> RewardFunction:
    """Combine a callable with the settings of its entry; raises UserError like `load_function`."""
    name, setting = reward_name(config), f"{entry}.function {config.function}"
    kwargs = dict(config.kwargs)
    if inspect.isclass(found):
        found = _instance(found, kwargs, setting)
    plain = inspect.unwrap(found)
    source = plain if inspect.isroutine(plain) else type(plain).__call__
    is_async = any(map(inspect.iscoroutinefunction, (found, source)))
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        raise UserError(f"{setting} has no signature that Python can read: wrap it in a `def`") from None
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    declared = getattr(found, "batch_size", 1)
    declared = declared(**kwargs) if callable(declared) else declared
    batch_size = declared if config.batch_size == "auto" else config.batch_size
    if batch_size != "group" and not (isinstance(batch_size, int) and batch_size >= 1):
        raise UserError(f"{setting} has batch_size {batch_size!r}: set it to group, or to 1 or more")
    builtin = BUILTINS.get(config.function) if isinstance(config.function, str) else None
    is_builtin = builtin is not None
    columns = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD} - set(CONTEXT) if is_builtin else set()
    for kwarg in kwargs:
        if kwarg in INPUTS or kwarg in columns:
            origin = "the rollout" if kwarg in INPUTS else "a column of the data"
            raise UserError(f"{entry}.kwargs {kwarg}: {name} receives {kwarg} from {origin}: leave it out")
        if kwarg not in named and (is_builtin or not takes_any):
            hint = did_you_mean(kwarg, named - {*INPUTS, *CONTEXT})
            raise UserError(f"{entry}.kwargs {kwarg}: {name} has no such parameter: {hint}")
    function: Callable[..., Any] = partial(found, **kwargs)
    accepted, instead = named, {}
    if named & {"solution_str", "solution_strs"}:
        function, instead = verl.adapted(function, named, takes_any, is_async), {"ground_truth": "reward_model"}
        needed = (verl.columns_of(needed) - {"solution_str", "data_source", "extra_info"}) | {"ground_truth"}
        accepted = verl.columns_of(named) - {"solution_str"}
        accepted |= {"completions", "reward_model", "ground_truth", "log_extra"}
        accepted |= {"data_source", "extra_info"} if takes_any else set()
        takes_any = False
    settings = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - set(CONTEXT) if is_builtin else set()
    interface = Interface(
        sorted(needed - kwargs.keys() - set(CONTEXT)), None if takes_any else sorted(accepted), is_async, batch_size,
        instead, sorted(settings), {"reads": builtin.reads if builtin else ""},
    )  # fmt: skip
    loaded = RewardFunction(name, function, interface, getattr(getattr(source, "__code__", None), "co_filename", None))
    if is_builtin:
        _check_builtin(loaded, entry)
    return loaded


def _instance(found: type, kwargs: dict[str, Any], setting: str) -> Callable[..., Any]:
    """Make the instance that is called in place of its class, and remove from `kwargs` what its constructor takes."""
    if not any("__call__" in vars(base) for base in found.__mro__):
        raise UserError(f"{setting} is a class without __call__: name a function, or a class of callable objects")
    try:
        given = {name: kwargs.pop(name) for name in inspect.signature(found).parameters if name in kwargs}
        return cast(Callable[..., Any], found(**given))
    except Exception as error:
        raise UserError(f"{setting} cannot be constructed: {describe(error, None)}: set its kwargs") from error


def _check_builtin(function: RewardFunction, entry: str) -> None:
    """Check the settings of a built-in by calling it with no rows; raises UserError."""
    try:
        result = function({name: [] for name in function.interface.required})
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except Exception as error:
        raise UserError(f"{entry}.kwargs are not valid for {function.name}: {describe(error, None)}") from error


def _find(spec: str, setting: str) -> Callable[..., Any]:
    """Return the function that a configuration names by `spec`; error messages begin with `setting`."""
    place, colon, attribute = spec.rpartition(":")
    if not colon:
        refuse_bare_file(spec, setting)
        if spec not in BUILTINS:
            instead = _GONE.get(spec) or did_you_mean(spec, BUILTINS)
            raise UserError(
                f"{setting} is not a built-in: {instead}; one of your own is given as"
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
