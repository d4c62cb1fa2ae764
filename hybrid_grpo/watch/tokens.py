"""Reads the tokens of saved completions, and what was recorded of each, from the parquet files of rollouts/."""

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
    import pyarrow.parquet  # only here: it takes longer to load than the rest of the server

    path = folder / "rollouts" / f"step_{step:06d}.parquet"
    try:
        known = pyarrow.parquet.read_schema(path).names
        columns = [name for name in ("sample", "pieces", "token_ids", "given", *SAMPLED) if name in known]
        rows = pyarrow.parquet.read_table(path, columns=columns, filters=[("row", "=", row)]).to_pylist()
    except (OSError, pyarrow.lib.ArrowException):  # the file is missing, or not written completely
        return None
    found = rows[0] if rows else {}
    if found.get("sample", sample) != sample or found.get("pieces") is None:
        return None
    pieces = found["pieces"]
    measured = {name: found[name] for name in SAMPLED if found.get(name) is not None}
    return {
        "pieces": pieces,
        "ids": found.get("token_ids") or [],
        "given": found.get("given") or [],
        "measures": {name: json_safe(values) for name, values in measured.items() if len(values) == len(pieces)},
    }
