"""The one exception a user can cause, and the words for it."""

import difflib
from collections.abc import Iterable

RESUME_STATUS = 75
"""Exit status of a run that was stopped, or had to be ended, and goes on with `--run.resume auto` (EX_TEMPFAIL)."""


class UserError(ValueError):
    """A mistake in what the user gave: one line that names the setting and the way out.

    The command line prints the message alone and exits with status 2. Anything else that is raised
    is a fault of this package and keeps its traceback.
    """


class RunStopped(UserError):
    """A run that cannot go on, told on all ranks alike before the step under way has changed anything."""


class RunInterrupted(RunStopped):
    """A run that was asked to stop, told on all ranks alike; the command line exits with status RESUME_STATUS."""


def refuse(condition: bool, message: str) -> None:
    """Raise a `UserError` where the condition holds."""
    if condition:
        raise UserError(message)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`did you mean X?` where a known name is near, else all the known ones."""
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known) or 'none'}"


def refuse_indivisible(name: str, value: int, divisor: int, why: str) -> None:
    """Refuse a number that does not divide evenly, with the nearest one that does."""
    nearest = max(divisor, round(value / divisor) * divisor)
    refuse(value % divisor != 0, f"{name} {value} does not divide by {why} = {divisor}: the nearest value is {nearest}")
