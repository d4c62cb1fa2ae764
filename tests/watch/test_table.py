import math

import numpy as np
import pytest

from hybrid_grpo.watch import table as tables
from hybrid_grpo.watch.table import Table


def test_columns_hold_what_the_rows_had():
    """Names that come late, or only now and then, or in another order."""
    table, rows = Table(), []
    for step in range(2500):
        row = {"step": step, "a": step / 3}
        if step % 700 == 5:
            row["eval"] = -step
        if step > 1500:
            row = {"late": None if step % 2 else 1e300, **row}
        rows.append(row)
        table.append(row)
    assert table.rows == 2500
    assert table.names == ["step", "a", "eval", "late"]
    for name in (*table.names, "unknown"):
        expected = [math.nan if row.get(name) is None else row[name] for row in rows]
        np.testing.assert_array_equal(table.column(name), expected, err_msg=name)


def test_a_row_that_holds_no_numbers_changes_nothing():
    table = Table()
    table.append({"step": 0, "a": 1.0})
    for value in ("text", [1], {}, 10**400):
        assert not table.append({"step": 1, "b": value})
    assert not table.append({"step": 0, "b": 1.0}), "it is not a later step"
    assert table.rows == 1
    assert table.names == ["step", "a"]
    assert table.column("a").tolist() == [1.0]


@pytest.mark.parametrize(("limit", "stride"), [("_MOST_ROWS", 16), ("_MOST_CELLS", 32)])
def test_a_table_that_is_too_large_keeps_evenly_spaced_rows(
    monkeypatch: pytest.MonkeyPatch, limit: str, stride: int
) -> None:
    """Rows beyond the limits were refused, and counted as damaged."""
    monkeypatch.setattr(tables, limit, 101)
    table = Table()
    for step in range(1000):
        assert table.append({"step": step, "a": step / 3} | ({"late": 1.0} if step > 500 else {}))
    assert table.column("step").tolist() == list(range(0, 1000, stride))
    assert table.column("a").tolist() == [step / 3 for step in range(0, 1000, stride)]
    assert not table.append({"step": 999, "a": 1.0}), "it is not a later step, although step 999 was not kept"
