"""Handles failed writes: raises them on all ranks, in one line. A disk may become full or read-only at any time."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed.ranks import all_gather_objects, rank
from hybrid_grpo.records.files import replace_text

T = TypeVar("T")

_ERRORS = (OSError, RuntimeError)
"""What Python and torch raise when a file cannot be written."""
_NO_SPACE = "No space left on device"


class WriteFailed(UserError):
    """Raised on all ranks if any rank could not write a file."""


def why(error: BaseException, folder: Path) -> str:
    """Return the reason for a failed write to `folder`, in the operating system's words if there are any."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.strerror:
            return f"{Path(link.filename).name}: {link.strerror}" if link.filename else link.strerror
        link = link.__cause__ or link.__context__
    while not folder.exists():
        folder = folder.parent
    # A full disk can also cause messages such as "unexpected pos 768 vs 662".
    return _NO_SPACE if shutil.disk_usage(folder).free < 2**20 else " ".join(str(error).split())


def write_together(work: Callable[[], T], folder: Path, errors: tuple[type[Exception], ...] = _ERRORS) -> list[T]:
    """Call `work`, which writes to `folder`, on every rank, and return the results of all ranks.

    Raises WriteFailed on all ranks, with the reason of the first rank that failed with one of `errors`. Collective.
    """
    done: tuple[T | None, str | None]
    try:
        done = work(), None
    except errors as error:
        done = None, why(error, folder)
    outcomes = all_gather_objects(done)
    for of_rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise WriteFailed(failure + (f" (rank {of_rank})" if len(outcomes) > 1 else ""))
    return [result for result, _ in outcomes]  # type: ignore[misc]  # no failure, so there is a result


@contextmanager
def one_line(folder: Path, go_on: str = ", then continue with --run.resume auto") -> Iterator[None]:
    """Turn a failed write to `folder` into a UserError of one line, which ends with `go_on`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written: {why(error, folder.absolute())}: make room or fix the cause{go_on}"
        ) from error


def write_prompts(folder: Path, prompts: list[dict[str, Any]]) -> None:
    """Write prompts.jsonl to a run's folder: one JSON object per prompt, which says how often it was solved."""
    if prompts and rank() == 0:
        lines = (json.dumps(prompt, ensure_ascii=False, default=str) + "\n" for prompt in prompts)
        with one_line(folder):
            replace_text(folder / "prompts.jsonl", "".join(lines))
