"""Reads the tokens of saved completions, with what was recorded about each, from the parquet files of rollouts/ and
replay/, one completion at a time.

Parquet files are read in a process of their own, with limits of memory and time: what a file says about its size cannot
be trusted, and a few kilobytes can decompress to gigabytes. As a program, this module is that process.
"""

import itertools
import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

from hybrid_grpo.records.files import as_json, json_safe
from hybrid_grpo.records.json_lines import Record, open_file

_MOST_ROWS, _MOST_BYTES, _BATCH = 2**17, 2**28, 64
"""Maximum size of a row group, and the number of rows that are read at a time."""
_MEMORY, _SECONDS, _LONGEST = 3 * 2**27, 1.4, 2**24
"""Limits of the process: bytes of memory, seconds for a completion, bytes of an answer."""
_PAUSE_S = 60.0
"""After a failure, a step's files are not read again for so long."""
SAMPLED = ("logp", "advantage")
"""Numbers that a run records for each token with its rollouts."""
REPLAYED = ("old_logp", "new_logp", "ref_logp", "kl", "ratio", "entropy", "clipped", "correction", "weight")
"""Numbers that a replay of the step adds for each token, from the last pass over the rollout."""


class TokenReader:
    """Has the process that reads tokens, which ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._failed: dict[tuple[str, int], float] = {}
        """By folder and step, when reading failed."""
        self._asking = threading.Lock()

    def read(self, folder: Path, step: int, row: int, sample: int | None) -> Record | None:
        """Like `read_tokens`; also return None if that takes too much time or memory."""
        place = str(folder.absolute()), step
        if not _path(folder, "rollouts", step).exists():
            return None
        with self._asking:
            if time.monotonic() - self._failed.get(place, -_PAUSE_S) < _PAUSE_S:
                return None
            answer = self._ask([*place, row, sample])
            if answer is None:
                self._failed[place] = time.monotonic()
            found: Record | None = json.loads(answer or b"null")
            return found

    def prepare(self) -> None:
        """Start the process without waiting for it, which takes half a second to import pyarrow."""
        with self._asking:
            self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command, pipe, root = [sys.executable, "-m", __name__], subprocess.PIPE, Path(__file__).parents[2]
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, cwd=root)
            self._is_ready = False
        return self._process

    def _ask(self, question: list[str | int | None]) -> bytes | None:
        process = self._start()
        assert process.stdin and process.stdout
        if not self._is_ready:
            process.stdout.readline()
            self._is_ready = True
        timer = threading.Timer(_SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline(_LONGEST)
        except OSError:
            answer = b""
        timer.cancel()
        if answer.endswith(b"\n"):
            return answer
        process.kill()
        process.communicate()
        self._process = None
        return None


def read_tokens(folder: Path, step: int, row: int, sample: int | None) -> Record | None:
    """Return what a run's folder has about the tokens of one completion; None if nothing in it matches.

    `row` is the completion's line in the rollouts of its step, counted from 0. `sample` is its number in its group, and
    must equal the recorded number. The result has `pieces` (the text of each sampled token), `ids`, `given` (texts that
    were not sampled, each with the number of tokens before it) and `measures`: lists as long as `pieces`, by name.
    """
    found = _read(_path(folder, "rollouts", step), row, ("sample", "pieces", "token_ids", "given", *SAMPLED))
    if not found or found.get("sample", sample) != sample or not isinstance(found.get("pieces"), list):
        return None
    pieces = [str(piece) for piece in found["pieces"]]
    ids = found.get("token_ids") or []
    replayed = _read(_path(folder, "replay", step), row, ("token_ids", *REPLAYED)) or {}
    if replayed.get("token_ids", ids) != ids:  # of another completion: the step has been run again
        replayed = {}
    measures = {name: values for name, values in (found | replayed).items() if name in (*SAMPLED, *REPLAYED)}
    given = found.get("given")
    given = [part for part in given if isinstance(part, dict)] if isinstance(given, list) else []
    return {
        "pieces": pieces,
        "ids": ids,
        "given": given,
        "measures": {
            name: json_safe(values)
            for name, values in measures.items()
            if isinstance(values, list) and len(values) == len(pieces)
        },
    }


def _path(folder: Path, kind: str, step: int) -> Path:
    return folder / kind / f"step_{step:06d}.parquet"


def _read(path: Path, row: int, columns: tuple[str, ...]) -> Record | None:
    """Return the last row of a parquet file whose column `row` equals `row`, with those of `columns` that the file has;
    None if no such row can be read."""
    import pyarrow.parquet  # only here: it takes longer to load than the rest of the server

    try:
        with open_file(path) as opened, pyarrow.parquet.ParquetFile(opened) as file:
            present = [name for name in columns if name in file.schema_arrow.names]
            for group in reversed(range(file.num_row_groups)):
                size = file.metadata.row_group(group)
                if size.num_rows > _MOST_ROWS or size.total_byte_size > _MOST_BYTES:
                    return None
                rows = file.read_row_group(group, columns=["row"], use_threads=False).column("row").to_pylist()
                if row in rows:
                    at = len(rows) - 1 - rows[::-1].index(row)
                    batches = file.iter_batches(_BATCH, row_groups=[group], columns=present, use_threads=False)
                    batch = next(itertools.islice(batches, at // _BATCH, None))
                    one: Record = batch.slice(at % _BATCH, 1).to_pylist()[0]
                    return one
    except (OSError, ValueError, KeyError, OverflowError, StopIteration, MemoryError, pyarrow.lib.ArrowException):
        pass  # the file is being written, or is damaged
    return None


def _serve() -> None:
    """Read questions from standard input, and write the answers to standard output, a line each."""
    import pyarrow.parquet

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    print(flush=True)
    for line in sys.stdin:
        folder, *which = json.loads(line)
        try:
            answer = as_json(read_tokens(Path(folder), *which))
        except MemoryError:
            return
        print(answer, flush=True)


if __name__ == "__main__":
    _serve()
