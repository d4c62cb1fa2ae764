"""Draws the charts of charts.yaml as one SVG picture, for places that cannot show an HTML page.

`curves.svg.j2` decides how the picture looks; this module turns values into points.
"""

from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from hybrid_grpo.records.charts.charts import Chart, charts_of
from hybrid_grpo.records.charts.thinning import Column, Points, present, smooth, thin

_SECTIONS = ("Results", "Rewards", "Completions", "Policy")
"""Sections of charts.yaml whose charts are drawn."""
_COLUMNS = 3
_WIDTH, _HEIGHT = 260, 120
"""Size of the area in which a chart's curves are drawn, in pixels."""
_MOST_POINTS = 250

Line = dict[str, Any]
"""One line of metrics.jsonl."""


def draw_curves(lines: list[Line]) -> str | None:
    """Return the curves of these lines of metrics.jsonl as SVG; None if there is nothing to draw yet."""
    steps = np.array([line["step"] for line in lines], np.float64)
    known = list(dict.fromkeys(name for line in lines for name, value in line.items() if value is not None))
    panels = [_panel(chart, lines, steps) for chart in charts_of(known) if chart.section in _SECTIONS]
    panels = [panel for panel in panels if panel]
    if not panels:
        return None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("curves.svg.j2").render(
        panels=panels, first=lines[0]["step"], last=lines[-1]["step"], columns=_COLUMNS, width=_WIDTH, height=_HEIGHT
    )


def _panel(chart: Chart, lines: list[Line], steps: Column) -> dict[str, Any]:
    """Return a chart with its curves as points in pixels; empty if no curve has two values or all values equal."""
    columns = [(curve, np.array([line.get(curve.name) for line in lines], np.float64)) for curve in chart.curves]
    drawn: list[tuple[str, Points]] = []
    for curve, column in columns:
        x, y = present(steps, np.where(np.isfinite(column), column, np.nan))
        points = thin((x, smooth(y, 2 * len(y) // _MOST_POINTS) if curve.noisy else y), _MOST_POINTS)
        drawn += [(curve.label, points)] if len(y) > 1 else []
    if chart.compared:  # each curve from its lowest value to its highest
        drawn = [(label, (x, (y - y.min()) / (np.ptp(y) or 1.0))) for label, (x, y) in drawn]
    values = np.concatenate([y for _, (_, y) in drawn] or [np.zeros(1)])
    low, high = float(values.min()), float(values.max())
    if low == high:
        return {}
    if chart.top is not None:
        low, high = 0.0, max(high, chart.top)

    def in_pixels(x: Column, y: Column) -> list[tuple[float, float]]:
        across, down = (x - steps[0]) / (steps[-1] - steps[0]), (high - y) / (high - low)
        return [
            (round(a * _WIDTH, 1), round(d * _HEIGHT, 1)) for a, d in zip(across.tolist(), down.tolist(), strict=True)
        ]

    curves = [{"label": label, "points": in_pixels(*points)} for label, points in drawn]
    return {"title": chart.title, "unit": chart.unit, "low": f"{low:.4g}", "high": f"{high:.4g}", "curves": curves}
