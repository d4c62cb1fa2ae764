"""Saves a view of a run on wandb: the charts of charts.yaml, as in report.html, grouped by a reader's questions."""

import re
from dataclasses import dataclass, field
from typing import Any

from hybrid_grpo.records.metrics.charts import CHARTS, STEP_PARTS
from hybrid_grpo.records.trackers.steps import STEP

QUESTIONS = {
    "Is it learning?": ("Results", "Rewards", "Data"),
    "Is it healthy?": ("Health", "Policy", "Sampler against trainer"),
    "What does it write?": ("Completions",),
    "Where does time go?": ("Speed and memory",),
}
"""The sections of the view, each with its sections of charts.yaml. The second also gets the sections of features."""


@dataclass(frozen=True)
class Plot:
    """One pair of axes."""

    title: str
    metrics: list[str] = field(default_factory=list)
    pattern: str = ""
    """Regular expression, used instead of `metrics` if their names vary, such as for all reward functions or sets."""
    top: float | None = None
    """Upper end of the y axis; None if the data decides."""
    is_stacked: bool = False


def plots() -> dict[str, list[Plot]]:
    """Return the plots of every section of the view, in order."""
    known = [section for sections in QUESTIONS.values() for section in sections]
    of_features = {"Is it healthy?": tuple(section for section in CHARTS if section not in known)}
    found = {
        question: [_plot(chart) for section in (*sections, *of_features.get(question, ())) for chart in CHARTS[section]]
        for question, sections in QUESTIONS.items()
    }
    parts = Plot("Seconds per step by part", [f"time/{part}_s" for part in STEP_PARTS], is_stacked=True)
    found["Where does time go?"].insert(0, parts)
    return found


def _plot(chart: dict[str, Any]) -> Plot:
    names, top = chart["metrics"], chart.get("top")
    if not any("<" in name for name in names):
        return Plot(chart["title"], names, top=top)
    patterns = [re.sub(r"<\w+>", "[^/]+", name) for name in names]
    return Plot(chart["title"], pattern="^(" + "|".join(patterns) + ")$", top=top)


def save_view(entity: str, project: str, run: str, run_id: str) -> str:
    """Save the view of a run, to which other runs can be added, and return its URL. Errors of wandb are raised."""
    view = make_view(entity, project, run, run_id)
    view.save()
    return str(view.url)


def make_view(entity: str, project: str, run: str, run_id: str) -> Any:
    """Return the view as a `wandb_workspaces.workspaces.Workspace`, without saving it."""
    import wandb_workspaces.reports.v2 as panels
    from wandb_workspaces import workspaces

    sections = []
    for question, drawn in plots().items():
        lines = [
            panels.LinePlot(
                title=plot.title,
                x=STEP,
                y=plot.metrics,
                metric_regex=plot.pattern or None,
                range_y=(0.0 if plot.top else None, plot.top),
                plot_type="stacked-area" if plot.is_stacked else "line",
            )
            for plot in drawn
        ]
        table = [panels.WeavePanelSummaryTable(table_name="samples")] if question == "What does it write?" else []
        sections.append(workspaces.Section(name=question, panels=[*table, *lines], is_open=True))
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=f"{run} ({run_id})",
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis=STEP),
        auto_generate_panels=True,
    )
