"""Shows where the time of steps went: the mean seconds of each part of a step, in columns of neighboring steps."""

from typing import Any

import numpy as np

from hybrid_grpo.records.metrics.catalogue import describe
from hybrid_grpo.records.metrics.charts import STEP_PARTS
from hybrid_grpo.watch.table import Table


def time_layers(table: Table, columns: int) -> dict[str, Any] | None:
    """Return at most `columns` columns, given by their first and last steps (`steps`), and for each part of a step its
    mean seconds in each column (`values`) and its seconds in all steps (`total`). The part `other` is what no timer
    covers; parts that took no time are left out. Return None if no step was timed."""
    whole = table.column("time/step_s")
    timed = np.flatnonzero(whole > 0)
    if not timed.size:
        return None
    steps = table.column("step")[timed].astype(int)
    parts = {part: np.nan_to_num(table.column(f"time/{part}_s")[timed]) for part in STEP_PARTS}
    parts["other"] = np.maximum(0.0, whole[timed] - sum(parts.values()))
    starts = np.unique(np.arange(columns) * timed.size // columns)
    sizes = np.diff(starts, append=timed.size)
    layers = [
        {
            "name": part,
            "meaning": "What no timer covers." if part == "other" else describe(f"time/{part}_s").meaning,
            "values": [float(f"{value:.4g}") for value in np.add.reduceat(seconds, starts) / sizes],
            "total": float(seconds.sum()),
        }
        for part, seconds in parts.items()
        if seconds.any()
    ]
    ends = zip(steps[starts].tolist(), steps[starts + sizes - 1].tolist(), strict=True)
    return {"steps": [list(pair) for pair in ends], "layers": layers}
