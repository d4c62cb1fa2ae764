"""The curves of a run as one SVG picture, for places that show no report.html: charts of the report, drawn plainly.

report.py decides what a chart shows, `curves.svg.j2` how the picture looks; here values become points.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jinja2

from hybrid_grpo.run.report import Line, charts, thin

_SECTIONS = ("Results", "Completions", "Policy")
"""Sections of the report whose charts are drawn."""
_COLUMNS = 3
_WIDTH, _HEIGHT = 260, 120
"""Of the area of a chart in which curves run, in pixels."""
_MOST_POINTS = 250

Values = list[float | None]


def draw_curves(lines: list[Line]) -> str | None:
    """The curves of these lines of metrics.jsonl as SVG; None where there are not two steps to draw a line between."""
    thinned = thin(lines, _MOST_POINTS) if lines else []
    steps = [line["step"] for line in thinned]
    panels = [_panel(chart, steps) for chart in charts(thinned) if chart["section"] in _SECTIONS]
    panels = [panel for panel in panels if panel]
    if not panels:
        return None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    sizes = {"columns": _COLUMNS, "width": _WIDTH, "height": _HEIGHT}
    return environment.get_template("curves.svg.j2").render(panels=panels, first=steps[0], last=steps[-1], **sizes)


def _panel(chart: dict[str, Any], steps: list[int]) -> dict[str, Any]:
    """A chart with its curves as points in pixels; empty where no curve has two values, or none ever changes."""
    drawn = [(curve["label"], curve.get("drawn", curve["values"])) for curve in chart["curves"]]
    drawn = [(label, values) for label, values in drawn if sum(map(_is_number, values)) > 1]
    values = [value for _, values in drawn for value in values if _is_number(value)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low == high:
        return {}
    if chart["top"] is not None:
        low, high = 0.0, max(high, chart["top"])
    return {
        "title": chart["title"],
        "unit": chart["unit"],
        "low": f"{low:.4g}",
        "high": f"{high:.4g}",
        "curves": [{"label": label, "points": _points(values, steps, low, high)} for label, values in drawn],
    }


def _points(values: Values, steps: list[int], low: float, high: float) -> list[tuple[float, float]]:
    length = steps[-1] - steps[0]
    return [
        (round((step - steps[0]) / length * _WIDTH, 1), round((high - value) / (high - low) * _HEIGHT, 1))
        for step, value in zip(steps, values, strict=True)
        if value is not None and math.isfinite(value)
    ]


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
