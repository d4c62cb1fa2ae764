"""The charts of a run: charts.yaml with the names of the run's own metrics filled in.

The page of `watch`, report.html, and the model card's picture draw them. This module does not import torch.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_grpo.records.metrics.catalogue import Metric, describe, read_with_features

CHARTS: dict[str, list[dict[str, Any]]] = {}
"""The charts of each section, from charts.yaml and from features."""
for _sections in read_with_features(Path(__file__).with_name("charts.yaml")):
    for _section, _charts in _sections.items():
        CHARTS.setdefault(_section, []).extend(_charts)

STEP_PARTS = ("generate", "reward_wait", "reference", "train", "switch")
"""The parts of a step's time; each is measured by the metric `time/<part>_s`."""


@dataclass(frozen=True)
class Curve:
    """A metric in a chart."""

    name: str
    label: str
    meaning: str
    noisy: bool
    """Whether neighboring values may be averaged (`is_noisy`)."""


@dataclass(frozen=True)
class Chart:
    """Curves that share a pair of axes."""

    section: str
    title: str
    unit: str
    top: float | None
    """Upper end of the y axis if it has a natural one, such as 1 for a fraction, else None."""
    curves: tuple[Curve, ...]
    band: str | None
    """Name of the metric that is the half-width of a band around the first curve; None if there is no band."""
    compared: bool
    """Whether each curve is scaled to its own lowest and highest value."""


def charts_of(known: Sequence[str]) -> list[Chart]:
    """Return the charts with at least one curve among these metrics; a chart that compares curves needs two."""
    drawn = []
    for section, members in CHARTS.items():
        for chart in members:
            curves = tuple(curve for pattern in chart["metrics"] for curve in _curves(pattern, known))
            band = _band(chart, curves, known)
            unit, compared = describe(chart["metrics"][0]).unit, chart.get("compared", False)
            if len(curves) > compared:
                drawn.append(Chart(section, chart["title"], unit, chart.get("top"), curves, band, compared))
    return drawn


def _band(chart: dict[str, Any], curves: Sequence[Curve], known: Sequence[str]) -> str | None:
    """Return the metric of the band around the first curve, with what the curve's own pattern stands for filled in."""
    band, first = chart.get("band"), curves[0].name if curves else ""
    for pattern in chart["metrics"]:
        found = re.fullmatch(re.sub(r"<(\w+)>", r"(?P<\1>[^/]+)", pattern), first)
        if found and band:
            for place, name in found.groupdict().items():
                band = band.replace(f"<{place}>", name)
    return band if band in known else None


def is_noisy(metric: Metric) -> bool:
    """Return whether a metric scatters from step to step, so that neighboring values may be averaged."""
    return metric.reduction != "same" and not metric.name.startswith("eval/")


def _curves(pattern: str, known: Sequence[str]) -> Iterator[Curve]:
    expression = re.compile(re.sub(r"<\w+>", "([^/]+)", pattern))
    for match in filter(None, map(expression.fullmatch, known)):
        metric = describe(match[0])
        stage, what, *_ = metric.name.split("/")
        label = " @".join(match.groups()) if match.groups() else (stage if what == "mean" else what).replace("_", " ")
        yield Curve(metric.name, label, metric.meaning, is_noisy(metric))
