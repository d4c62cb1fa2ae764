import math

import numpy as np

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
        np.testing.assert_array_equal(table.column(name), expected)


def test_a_row_that_holds_no_numbers_changes_nothing():
    table = Table()
    table.append({"step": 0, "a": 1.0})
    for value in ("text", [1], {}, 10**400):
        assert not table.append({"step": 1, "b": value})
    assert not table.append({"step": 0, "b": 1.0}), "it is not a later step"
    assert table.rows == 1
    assert table.names == ["step", "a"]
    assert table.column("a").tolist() == [1.0]
