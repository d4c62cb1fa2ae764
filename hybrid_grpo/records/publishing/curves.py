"""The curves of a run as one SVG picture, for places that show no page: the charts of charts.yaml, drawn plainly.

`curves.svg.j2` decides how the picture looks; here values become points.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any, TypeGuard

import jinja2

from hybrid_grpo.records.metrics.catalogue import find
from hybrid_grpo.records.metrics.charts import Chart, charts_of, is_noisy

_SECTIONS = ("Results", "Completions", "Policy")
"""Sections of charts.yaml whose charts are drawn."""
_COLUMNS = 3
_WIDTH, _HEIGHT = 260, 120
"""Of the area of a chart in which curves run, in pixels."""
_MOST_POINTS = 250

Values = list[float | None]
Line = dict[str, Any]
"""One line of metrics.jsonl."""


def draw_curves(lines: list[Line]) -> str | None:
    """The curves of these lines of metrics.jsonl as SVG; None where there are not two steps to draw a line between."""
    thinned = thin(lines, _MOST_POINTS) if lines else []
    steps = [line["step"] for line in thinned]
    known = list(dict.fromkeys(name for line in thinned for name, value in line.items() if value is not None))
    panels = [_panel(chart, thinned) for chart in charts_of(known) if chart.section in _SECTIONS]
    panels = [panel for panel in panels if panel]
    if not panels:
        return None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    sizes = {"columns": _COLUMNS, "width": _WIDTH, "height": _HEIGHT}
    return environment.get_template("curves.svg.j2").render(panels=panels, first=steps[0], last=steps[-1], **sizes)


def _panel(chart: Chart, lines: list[Line]) -> dict[str, Any]:
    """A chart with its curves as points in pixels; empty where no curve has two values, or none ever changes."""
    steps = [line["step"] for line in lines]
    columns = [(curve.label, [line.get(curve.name) for line in lines]) for curve in chart.curves]
    drawn = [(label, values) for label, values in columns if sum(map(_is_number, values)) > 1]
    if chart.compared:
        drawn = [(label, _shares(values)) for label, values in drawn]
    values = [value for _, values in drawn for value in values if _is_number(value)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low == high:
        return {}
    if chart.top is not None:
        low, high = 0.0, max(high, chart.top)
    return {
        "title": chart.title,
        "unit": chart.unit,
        "low": f"{low:.4g}",
        "high": f"{high:.4g}",
        "curves": [{"label": label, "points": _points(values, steps, low, high)} for label, values in drawn],
    }


def _shares(values: Values) -> Values:
    """Each value as a share of the way from the lowest of them to the highest."""
    numbers = [value for value in values if _is_number(value)]
    low, high = min(numbers), max(numbers)
    return [(value - low) / (high - low or 1.0) if _is_number(value) else None for value in values]


def _points(values: Values, steps: list[int], low: float, high: float) -> list[tuple[float, float]]:
    length = steps[-1] - steps[0]
    return [
        (round((step - steps[0]) / length * _WIDTH, 1), round((high - value) / (high - low) * _HEIGHT, 1))
        for step, value in zip(steps, values, strict=True)
        if _is_number(value)
    ]


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def thin(lines: list[Line], limit: int) -> list[Line]:
    """At most `limit` lines: the first, then runs of neighbours, their means averaged and their extremes kept."""
    size = max(1, -(-(len(lines) - 1) // (limit - 1)))
    return lines[:1] + [_merge(lines[start : start + size]) for start in range(1, len(lines), size)]


def _merge(lines: list[Line]) -> Line:
    merged: Line = {}
    for name in dict.fromkeys(name for line in lines for name in line):
        values = [line[name] for line in lines if line.get(name) is not None]
        metric = find(name)
        if values and metric is not None and is_noisy(metric):
            merged[name] = {"max": max, "min": min}.get(metric.reduction, statistics.fmean)(values)
        else:
            merged[name] = values[-1] if values else None
    return merged
