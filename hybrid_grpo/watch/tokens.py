"""Reads the tokens of saved completions, with what was recorded about each, from the parquet files of rollouts/, one
completion at a time."""

from pathlib import Path

from hybrid_grpo.records.files import json_safe
from hybrid_grpo.records.json_lines import Record

SAMPLED = ("logp", "advantage")
"""Numbers that a run records for each token with its rollouts."""


def read_tokens(folder: Path, step: int, row: int, sample: int | None) -> Record | None:
    """Return what a run's folder has about the tokens of one completion; None if nothing in it matches.

    `row` is the completion's line in the rollouts of its step, counted from 0. `sample` is its number in its group, and
    must equal the recorded number. The result has `pieces` (the text of each sampled token), `ids`, `given` (texts that
    were not sampled, each with the number of tokens before it) and `measures`: lists as long as `pieces`, by name.
    """
    path = folder / "rollouts" / f"step_{step:06d}.parquet"
    found = _read(path, row, ("sample", "pieces", "token_ids", "given", *SAMPLED))
    if not found or found.get("sample", sample) != sample or found.get("pieces") is None:
        return None
    pieces = found["pieces"]
    measured = {name: found[name] for name in SAMPLED if found.get(name) is not None}
    return {
        "pieces": pieces,
        "ids": found.get("token_ids") or [],
        "given": found.get("given") or [],
        "measures": {name: json_safe(values) for name, values in measured.items() if len(values) == len(pieces)},
    }


def _read(path: Path, row: int, columns: tuple[str, ...]) -> Record | None:
    """Return the row of a parquet file whose column `row` equals `row`, with those of `columns` that the file has; None
    if there is no such row, or the file is missing or not written completely."""
    import pyarrow.parquet  # only here: it takes longer to load than the rest of the server

    try:
        present = [name for name in columns if name in pyarrow.parquet.read_schema(path).names]
        rows = pyarrow.parquet.read_table(path, columns=present, filters=[("row", "=", row)]).to_pylist()
    except (OSError, pyarrow.lib.ArrowException):
        return None
    return rows[0] if rows else None
