from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from hybrid_grpo.watch.rollouts import read_tokens

LOGP = np.array([-0.1, -2.3456789, -1e-7], np.float32)


def write(path: Path, row_group: int = 100, **changed: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns() | changed), path, row_group_size=row_group)


def columns() -> dict[str, list[Any]]:
    """Three completions: the first two of a group, and the first of another."""
    return {
        "row": [0, 1, 2], "prompt_index": [7, 7, 9], "sample": [0, 1, 0], "prompt_ids": [[1]] * 3,
        "token_ids": [[5, 6, 0], [8, 0], []], "pieces": [["a", "b\n", "<eos>"], ["\ufffd", ""], []],
        "logp": [LOGP, LOGP[:2], LOGP[:0]], "advantage": [[0.5] * 3, [-0.5] * 2, []],
        "given": [[{"before": 1, "text": "tool"}], [], []], "finish": ["stop", "stop", "length"],
    }  # fmt: skip


@pytest.mark.parametrize("row_group", [1, 100])
def test_numbers_are_the_recorded_ones_to_the_bit(tmp_path: Path, row_group: int) -> None:
    write(tmp_path / "rollouts/step_000003.parquet", row_group)
    first = read_tokens(tmp_path, 3, 0, 0)
    assert first is not None
    assert first["pieces"] == ["a", "b\n", "<eos>"]
    assert (first["ids"], first["given"]) == ([5, 6, 0], [{"before": 1, "text": "tool"}])
    assert first["measures"] == {"logp": [float(value) for value in LOGP], "advantage": [0.5] * 3}
    second = read_tokens(tmp_path, 3, 1, 1)
    assert second is not None and second["measures"]["advantage"] == [-0.5] * 2
    empty = read_tokens(tmp_path, 3, 2, 0)
    assert empty is not None and empty["pieces"] == []


def test_nothing_where_there_is_no_whole_file_or_another_completion(tmp_path: Path) -> None:
    path = tmp_path / "rollouts/step_000003.parquet"
    assert read_tokens(tmp_path, 3, 0, 0) is None
    write(path)
    assert read_tokens(tmp_path, 3, 7, 0) is None, "no such line"
    assert read_tokens(tmp_path, 3, 0, 1) is None, "another completion of the group"
    path.write_bytes(path.read_bytes()[:-20])
    assert read_tokens(tmp_path, 3, 0, 0) is None, "it is being written"
    path.write_bytes(b"")
    assert read_tokens(tmp_path, 3, 0, 0) is None
