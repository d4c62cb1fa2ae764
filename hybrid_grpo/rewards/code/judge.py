"""Runs tests and the program under test in two processes, connected by a channel.

The judge runs the tests; calls of the program's functions are carried out in the program's process. The program thus
sees no test and no expected value, and cannot change what `==`, `assert` or `sorted` mean to the judge. If the program
ends, the remaining tests fail. The judge receives copies of plain data: numbers, text, containers and a few types of
the standard library, but no subclasses. Any other object stays in the program's process, and the judge gets a `Proxy`.

This module uses only the standard library, because it runs in processes without site-packages.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
import sys
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

_EXACT = (
    *(int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset, range, slice),
    *(Counter, OrderedDict, deque, date, datetime, time, timedelta, timezone, Decimal, Fraction),
)
_NAMES = {(kind.__module__, kind.__qualname__): kind for kind in _EXACT}
"""The only types that a message of the program can make the judge construct."""
_IMMUTABLE = {int, float, complex, str, bytes, bytearray, range, date, datetime, time, timedelta, timezone, Decimal}
"""Those of the exact types whose instances have neither attributes nor parts."""
_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__, float: float.__float__, str: str.__str__, dict: dict.items,
    tuple: tuple.__iter__, list: list.__iter__, set: set.__iter__,
}  # fmt: skip
"""An instance of a subclass (a named tuple, an IntEnum, a defaultdict) is copied as its base class, by the base class's
own method, which the subclass cannot override."""
_PREDICATES = {
    *(name for kind in (str, bytes) for name in vars(kind) if name.startswith("is")),
    *("startswith", "endswith", "issubset", "issuperset", "isdisjoint", "equals"),
}
"""Methods that a `Proxy` refuses: the program's own version could return True for every expected value."""
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def _kept(by: str, number: int) -> Any:
    """Stands in a message for the object with this number, which stays with the message's `sender` or `receiver`."""
    raise AssertionError


def _remote_method(operation: str) -> Any:
    """A method that makes the other side perform one of `_OPERATIONS`."""
    return lambda proxy, *arguments: proxy._ask(operation, *arguments)


class Proxy:
    """Stands for an object in the other process. It can be called, iterated and indexed like the object, and has the
    same attributes, but it can be equal only to another `Proxy`."""

    __slots__ = ("_target",)
    _target: tuple[Channel, int]
    __hash__ = object.__hash__

    def __init__(self, channel: Channel, number: int) -> None:
        object.__setattr__(self, "_target", (channel, number))

    __setattr__ = _remote_method("set")
    __getitem__ = _remote_method("item")
    __len__ = _remote_method("len")
    __bool__ = _remote_method("bool")
    __str__ = _remote_method("str")
    __repr__ = _remote_method("repr")

    def __getattr__(self, name: str) -> Any:
        if name in _PREDICATES:
            raise AttributeError(f"{name}: this is not a text or set, but an object of the program")
        return self._ask("get", name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proxy) and bool(self._ask("equal", other))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._ask("iter")
        while True:
            values = iterator._ask("next")
            if not values:
                return
            yield values[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        channel, number = self._target
        sent = channel.dump((args, kwargs))
        result, changed = channel.ask("call", number, sent)
        if changed is not None:
            for old, new in zip((*args, *kwargs.values()), (*changed[0], *changed[1].values()), strict=False):
                _update(old, new)
        return result

    def _ask(self, what: str, *arguments: Any) -> Any:
        channel, number = self._target
        return channel.ask(what, number, *arguments)


class _Own:
    """Wraps a function of the judge that the program returns, or a class that a message names, so that it can only be
    called. Without this, a message could set attributes of the function or class, such as a function's defaults."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class Channel:
    """One end of the connection. Both ends can send requests, even while answering one: arguments may be functions."""

    def __init__(self, connection: Connection, *, trusting: bool) -> None:
        self._connection = connection
        self.trusting = trusting
        """Whether the other side may construct any object here and perform all `_OPERATIONS`."""
        self.objects: list[Any] = []
        """Objects of this side that the other side knows, by number."""
        self._numbers: dict[int, int] = {}
        self._proxies: dict[int, Proxy] = {}

    def ask(self, what: str, *arguments: Any) -> Any:
        """Make the other side perform one of `_OPERATIONS` or a call. Raises the other side's exception if it is
        builtin, else RuntimeError; EOFError or OSError if that side is gone."""
        self._connection.send_bytes(self.dump((what, *arguments)))
        while True:
            what, *arguments = self.load(self._connection.recv_bytes())
            if what == "value":
                return arguments[0]
            if what == "raised":
                raise _exception(*arguments)
            self._answer(str(what), arguments)

    def serve(self) -> None:
        """Answer until the other side is gone."""
        with suppress(EOFError, OSError):
            while True:
                what, *arguments = self.load(self._connection.recv_bytes())
                self._answer(what, arguments)

    def dump(self, value: Any) -> bytes:
        """Pickle a value, with a number in place of each object that cannot be copied."""
        stream = io.BytesIO()
        _Pickler(self, stream).dump(value)
        return stream.getvalue()

    def load(self, data: bytes) -> Any:
        value = _Unpickler(self, data).load()
        return value if self.trusting else _copied(value, {})

    def keep(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self._numbers[id(value)]

    def kept(self, by: str, number: int) -> Any:
        """Return the object with this number: the other side's if `by` is `sender`, this side's if it is `receiver`."""
        if by == "receiver" and self.trusting:
            return self.objects[number]
        if by == "receiver":
            return _Own(self.objects[number])
        return self._proxies.setdefault(number, Proxy(self, number))

    def _answer(self, what: str, arguments: Sequence[Any]) -> None:
        try:
            number, *rest = arguments
            if what == "call":
                reply = self._call(self.objects[number], *rest)
            elif self.trusting:
                reply = _OPERATIONS[what](self.objects[number], *rest)
            else:
                raise PermissionError(what)
            message = self.dump(("value", reply))
        except BaseException as error:
            message = self.dump(("raised", type(error).__name__, str(error)[:1000]))
        self._connection.send_bytes(message)

    def _call(self, function: Any, sent: bytes) -> tuple[Any, Any]:
        """Call a function. Return its result, and its arguments if the call has changed them, else None."""
        args, kwargs = self.load(sent)
        result = function(*args, **kwargs)
        with suppress(Exception):
            if self.dump((args, kwargs)) != sent:
                return result, (args, kwargs)
        return result, None


class _Pickler(pickle.Pickler):
    def __init__(self, channel: Channel, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self._channel = channel

    def reducer_override(self, value: Any) -> Any:
        """Choose how an object that is sent is pickled; see pickle.Pickler.reducer_override."""
        if isinstance(value, Proxy):
            return _kept, ("receiver", value._target[1])
        if value is _kept or type(value) in _EXACT or (isinstance(value, type) and value in _EXACT):
            return NotImplemented
        for base, plain in _PLAIN.items():
            if isinstance(value, base):
                return base, (base(plain(value)),)
        if self._channel.trusting or (isinstance(value, (*_FUNCTIONS, _Own)) and not _is_importable(value)):
            return _kept, ("sender", self._channel.keep(value))
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, channel: Channel, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._channel = channel

    def find_class(self, module: str, name: str) -> Any:
        """Return what a message names: anything if the sender is trusted, otherwise only a type of plain data."""
        if (module, name) == (__name__, "_kept"):
            return self._channel.kept if self._channel.trusting else _Own(self._channel.kept)
        if self._channel.trusting:
            return super().find_class(module, name)
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return _Own(_NAMES[module, name])


def _is_importable(function: Any) -> bool:
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    return module is not None and getattr(module, getattr(function, "__qualname__", ""), None) is function


def _copied(value: Any, made: dict[int, Any]) -> Any:
    """Copy a loaded value without the attributes (and so the methods) that a message can add to its objects. `made`
    maps the id of each original to its copy, so that an object that occurs twice is copied once."""
    kind = type(value)
    if id(value) in made:
        return made[id(value)]
    if kind is Proxy or kind is _Own or value is None or kind is bool or kind in _IMMUTABLE:
        return value
    copy: Any
    if kind in (list, set, deque):
        copy = made[id(value)] = deque(maxlen=value.maxlen) if kind is deque else kind()
        (copy.update if kind is set else copy.extend)([_copied(part, made) for part in value])
    elif kind in (dict, Counter, OrderedDict):
        copy = made[id(value)] = kind()
        for key, part in kind.items(value):
            copy[_copied(key, made)] = _copied(part, made)
    elif kind in (tuple, frozenset):
        copy = made[id(value)] = kind([_copied(part, made) for part in value])
    elif kind is slice:
        copy = slice(*(_copied(part, made) for part in (value.start, value.stop, value.step)))
    elif kind is Fraction and type(value.numerator) is type(value.denominator) is int:
        copy = Fraction(value.numerator, value.denominator)
    else:
        raise pickle.UnpicklingError(f"{kind.__name__} is not plain data")
    return copy


def _update(old: Any, new: Any) -> None:
    """Apply to an argument the changes that the program made to its copy."""
    if type(old) is not type(new):
        return
    if isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, dict | set | deque):
        old.clear()
        (old.extend if isinstance(old, deque) else old.update)(new)


def _exception(name: str, text: str) -> Exception:
    kind = getattr(builtins, str(name), None)
    # As in a generator (PEP 479): otherwise `map`, `zip` and `filter` would end before all tests have run.
    ends_loops = kind in (StopIteration, StopAsyncIteration)
    if isinstance(kind, type) and issubclass(kind, Exception) and not ends_loops:
        with suppress(Exception):
            return kind(text)
    return RuntimeError(f"{name}: {text}")


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr, "set": setattr, "item": lambda value, key: value[key], "len": len, "bool": bool, "str": str,
    "repr": repr, "equal": lambda a, b: bool(a == b), "iter": iter, "next": lambda iterator: list(islice(iterator, 1)),
}  # fmt: skip
"""What the judge can request besides calls; each operation takes the object as its first argument."""


def run_program(source: str, name: str) -> dict[str, Any]:
    """Run a program as the module `name`; returns its globals."""
    code = compile(source, "<program>", "exec", dont_inherit=True)
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(code, module.__dict__)
    return module.__dict__


def serve_program(source: str, connection: Connection) -> None:
    """Run a program, then carry out the judge's requests."""
    program = run_program(source, "solution")
    channel = Channel(connection, trusting=True)
    channel.keep(lambda names: {name: program[name] for name in names if name in program})  # number 0
    channel.serve()


def judge(tests: str, verdict: int, connection: Connection) -> None:
    """Run tests against the program at the other end, and write "1" or "0" for each to the descriptor `verdict`.
    `tests` is JSON: `names` lists the program's names that the tests use; `parts` lists pairs of code and whether that
    code counts as a test. The parts run one after the other in one module."""
    order = json.loads(tests)
    channel = Channel(connection, trusting=False)
    space: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    names = tuple(order["names"])  # the program could change a list
    with suppress(Exception):
        found = channel.kept("sender", 0)(names)
        # Only the requested names: another one could replace a builtin.
        found = {name: found[name] for name in names if name in found}
        space.update(found)
        vars(module).update(found)
    for code, counts in order["parts"]:
        passed = b"0"
        with suppress(BaseException):
            exec(compile(code, "<tests>", "exec", dont_inherit=True), space)
            passed = b"1"
        if counts:
            os.write(verdict, passed)
