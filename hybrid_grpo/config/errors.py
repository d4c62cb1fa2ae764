"""`UserError`: the user's mistake, shown as one line."""

import difflib
from collections.abc import Iterable
from typing import Any

RESUME_STATUS = 75
"""Exit status of a run that stopped early and continues with `--run.resume auto` (EX_TEMPFAIL)."""


class UserError(ValueError):
    """A mistake of the user, described in one line that names the setting and the way out.

    The command line prints only the message, and exits with status 2. Any other exception is a fault of this package
    and keeps its traceback.
    """

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows (IPython's protocol): the message alone."""
        return [f"{type(self).__name__}: {self}"]


class RunStopped(UserError):
    """The run cannot continue. Raised on all ranks alike, before the current step has changed anything."""


class RunInterrupted(RunStopped):
    """The run was asked to stop. Raised on all ranks alike; the command line exits with status RESUME_STATUS."""


def refuse(condition: bool, message: str) -> None:
    """Raise a `UserError` if the condition holds."""
    if condition:
        raise UserError(message)


def did_you_mean(name: str, names: Iterable[str], likeness: float = 0.5) -> str:
    """Return `did you mean X?` if a known name is similar to `name`, otherwise a list of the known names."""
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=likeness)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known) or 'none'}"


def type_of(value: Any) -> str:
    """Return the type of a value with its article, such as `an int`; `None` for None."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def refuse_indivisible(name: str, value: int, divisor: int, why: str) -> None:
    """Refuse a number that is not a multiple of the divisor, and name the nearest one that is."""
    nearest = max(divisor, round(value / divisor) * divisor)
    refuse(value % divisor != 0, f"{name} {value} does not divide by {why} = {divisor}: the nearest value is {nearest}")
