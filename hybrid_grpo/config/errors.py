"""`UserError`: the user's mistake, shown as one line."""

import difflib
from collections.abc import Iterable

RESUME_STATUS = 75
"""Exit status of a run that stopped early and continues with `--run.resume auto` (EX_TEMPFAIL)."""


class UserError(ValueError):
    """A mistake in what the user gave: one line that names the setting and the way out.

    The command line prints the message alone and exits with status 2. Anything else that is raised
    is a fault of this package and keeps its traceback.
    """


class RunStopped(UserError):
    """A run that cannot continue; raised on all ranks alike, before the current step has changed anything."""


class RunInterrupted(RunStopped):
    """A run that was asked to stop; raised on all ranks alike. The command line exits with status RESUME_STATUS."""


def refuse(condition: bool, message: str) -> None:
    """Raise a `UserError` if the condition holds."""
    if condition:
        raise UserError(message)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`did you mean X?` if a known name is similar, else the list of known names."""
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known) or 'none'}"


def refuse_indivisible(name: str, value: int, divisor: int, why: str) -> None:
    """Refuse a number that is not a multiple of the divisor, and name the nearest one that is."""
    nearest = max(divisor, round(value / divisor) * divisor)
    refuse(value % divisor != 0, f"{name} {value} does not divide by {why} = {divisor}: the nearest value is {nearest}")
