"""The types of settings: bounded numbers, non-empty text, and values that may be given as Python objects."""

import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import AfterValidator, AllowInfNan, BeforeValidator, ConfigDict, PlainSerializer, Strict, ValidationError
from pydantic_core import PydanticCustomError

SECTION = ConfigDict(extra="forbid", use_attribute_docstrings=True)
"""Pydantic's settings for all sections: unknown names are refused, and the docstring below a field is its help text."""


def _read_number(value: Any) -> Any:
    """Convert text such as `1e-6`, which YAML does not read as a number, to a number; return other values unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[\w.][\w.\-]{0,127}", name) or name.strip(".") == "":
        raise ValueError(f"{name!r} must be at most 128 letters, digits, '.', '_' or '-', without '-' in front")
    return name


def duration_seconds(text: str) -> float:
    """Convert a time to seconds: 90m, 11h30m, 45s, 30:00, 12:00:00 or 1-00:00:00. Raises ValueError for other text."""
    units = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)
    clock = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    found = units or clock
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise ValueError(f"{text!r} is not a time: write 90m, 11h30m or 1-00:00:00 (days-hours:minutes:seconds)")
    return float(total)


def _check_duration(text: str) -> str:
    duration_seconds(text)
    return text


def _check_source(source: Any) -> Any:
    is_mapping = isinstance(source, Mapping) and not hasattr(source, "column_names")  # a DatasetDict has them
    if source is None or is_mapping or isinstance(source, (bool, int, float)):
        raise PydanticCustomError("source_type", "no source of rows")
    return os.path.expanduser(source) if isinstance(source, str) else source


def _source_text(source: Any) -> Any:
    kind = type(source)
    return source if source is None or isinstance(source, str) else f"<{kind.__module__}.{kind.__qualname__}>"


def function_text(function: str | Callable[..., Any]) -> str:
    """Return the name by which settings refer to a function, `module:name`. Text is returned unchanged."""
    if isinstance(function, str):
        return function
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


Number = Annotated[float, Strict(), AllowInfNan(False), BeforeValidator(_read_number)]
Positive = Annotated[Number, Gt(0)]
NotNegative = Annotated[Number, Ge(0)]
Share = Annotated[Number, Ge(0), Le(1)]
PositiveShare = Annotated[Number, Gt(0), Le(1)]
LARGEST_WHOLE = 2**53
"""Upper bound of whole numbers in settings. Every reader of the run's JSON represents numbers up to it exactly."""
Whole = Annotated[int, Strict(), Ge(0), Le(LARGEST_WHOLE)]
Count = Annotated[int, Strict(), Ge(1), Le(LARGEST_WHOLE)]
Seconds = Annotated[Number, Gt(0), Le(1e9)]
Gibibytes = Annotated[Number, Gt(0), Le(1e6)]
LIMITS = (LARGEST_WHOLE, 1e9, 1e6)
"""Technical upper bounds, which the help text of a setting does not mention."""
Switch = Annotated[bool, Strict()]
Text = Annotated[str, MinLen(1)]
HOME = AfterValidator(os.path.expanduser)
Place = Annotated[Text, HOME]
"""Path of a file or folder, in which ~ is the user's home folder, or a name on the hub."""
Duration = Annotated[Text, BeforeValidator(lambda v: str(v) if type(v) is int else v), AfterValidator(_check_duration)]
"""A duration as text; see `duration_seconds`."""
Name = Annotated[str, AfterValidator(_check_name)]
"""Name of a file, folder or metric."""
Function = Annotated[Text | Callable[..., Any], PlainSerializer(function_text)]
"""`path/to/file.py:name`, `package.module:name` or the name of a built-in; in Python also the function itself."""
Source = Annotated[Any, AfterValidator(_check_source), PlainSerializer(_source_text)]
"""File, folder or hub name; in Python also a `datasets.Dataset` or `DatasetDict`, or a list of rows."""

T = TypeVar("T")


def checked_settings(cls: Callable[..., T], *values: Any) -> T:
    """Return the settings of a built-in function as its pydantic dataclass `cls`, made from the values of the fields in
    order. Raises ValueError, which names the field, if a value is wrong."""
    try:
        return cls(*values)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = [*inspect.signature(cls).parameters][int(wrong["loc"][0])]
        # The message leaves out the value, which may be a secret in the wrong place.
        raise ValueError(f"{name}: {wrong['msg']}") from None
