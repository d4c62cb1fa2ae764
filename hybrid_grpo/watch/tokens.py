"""Reads the tokens of saved completions, with what was recorded about each, from the parquet files of rollouts/ and
replay/, one completion at a time."""

from pathlib import Path

from hybrid_grpo.records.files import json_safe
from hybrid_grpo.records.json_lines import Record, open_file

_MOST_ROWS, _MOST_BYTES = 2**17, 2**28
"""Maximum size of a row group, since a row group is read as a whole."""
SAMPLED = ("logp", "advantage")
"""Numbers that a run records for each token with its rollouts."""
REPLAYED = ("old_logp", "new_logp", "ref_logp", "kl", "ratio", "entropy", "clipped", "correction", "weight")
"""Numbers that a replay of the step adds for each token, from the last pass over the rollout."""


def read_tokens(folder: Path, step: int, row: int, sample: int | None) -> Record | None:
    """Return what a run's folder has about the tokens of one completion; None if nothing in it matches.

    `row` is the completion's line in the rollouts of its step, counted from 0. `sample` is its number in its group, and
    must equal the recorded number. The result has `pieces` (the text of each sampled token), `ids`, `given` (texts that
    were not sampled, each with the number of tokens before it) and `measures`: lists as long as `pieces`, by name.
    """
    name = f"step_{step:06d}.parquet"
    found = _read(folder / "rollouts" / name, row, ("sample", "pieces", "token_ids", "given", *SAMPLED))
    if not found or found.get("sample", sample) != sample or not isinstance(found.get("pieces"), list):
        return None
    pieces = [str(piece) for piece in found["pieces"]]
    ids = found.get("token_ids") or []
    replayed = _read(folder / "replay" / name, row, ("token_ids", *REPLAYED)) or {}
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
                rows = file.read_row_group(group, columns=["row"]).column("row").to_pylist()
                if row in rows:
                    at = len(rows) - 1 - rows[::-1].index(row)
                    one: Record = file.read_row_group(group, columns=present).slice(at, 1).to_pylist()[0]
                    return one
    except (OSError, ValueError, KeyError, OverflowError, MemoryError, pyarrow.lib.ArrowException):
        pass  # the file is being written, or is damaged
    return None
