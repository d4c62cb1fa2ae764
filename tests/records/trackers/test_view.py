"""The view of a run on wandb, without a server."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from hybrid_grpo.config import LogConfig
from hybrid_grpo.records.metrics.catalogue import CATALOGUE, find
from hybrid_grpo.records.metrics.charts import CHARTS
from hybrid_grpo.records.trackers.view import QUESTIONS, make_view, plots
from hybrid_grpo.records.trackers.wandb import WandbTracker


def test_every_chart_of_the_report_answers_one_question():
    """Sections of features say whether the run is healthy."""
    drawn, of_features = plots(), set(CHARTS) - {section for sections in QUESTIONS.values() for section in sections}
    assert drawn.keys() == QUESTIONS.keys()
    for question, sections in QUESTIONS.items():
        more = of_features if question == "Is it healthy?" else set()
        titles = [chart["title"] for section in CHARTS if section in {*sections, *more} for chart in CHARTS[section]]
        assert sorted(plot.title for plot in drawn[question] if not plot.is_stacked) == sorted(titles)


def test_every_plot_finds_the_metrics_of_its_chart_and_no_others():
    spelled = [re.sub(r"<\w+>", "name", metric.name.replace("<k>", "8")) for metric in CATALOGUE]
    for plot in (plot for section in plots().values() for plot in section):
        matching = [name for name in spelled if plot.pattern and re.search(plot.pattern, name)]
        assert bool(plot.metrics) != bool(matching), plot.title
        assert all(find(name) for name in plot.metrics)
    (accuracy,) = [plot for plot in plots()["Is it learning?"] if plot.title == "Held-out accuracy"]
    assert accuracy.top == 1.0 and re.search(accuracy.pattern, "eval/maths/accuracy")
    assert not re.search(accuracy.pattern, "eval/maths/accuracy/more")


def stand_in(monkeypatch, fails=""):
    """In the place of wandb and wandb_workspaces, packages that keep what they are given."""
    saved = []

    class Workspace(SimpleNamespace):
        url = "https://view"

        def save(self):
            if fails:
                raise RuntimeError(fails)
            saved.append(self)

    names = ("wandb_workspaces", "wandb_workspaces.reports", "wandb_workspaces.reports.v2")
    modules = {name: ModuleType(name) for name in names}
    record = SimpleNamespace
    modules["wandb_workspaces"].workspaces = record(Section=record, WorkspaceSettings=record, Workspace=Workspace)
    modules["wandb_workspaces"].reports = modules["wandb_workspaces.reports"]
    modules["wandb_workspaces.reports"].v2 = modules["wandb_workspaces.reports.v2"]
    modules["wandb_workspaces.reports.v2"].LinePlot = record
    modules["wandb_workspaces.reports.v2"].WeavePanelSummaryTable = record
    run = SimpleNamespace(url="https://run", entity="team", project="sorting", name="first", id="1a", step=0)
    run.define_metric = lambda *args, **options: None
    modules["wandb"] = ModuleType("wandb")
    modules["wandb"].init, modules["wandb"].Settings = lambda **options: run, record
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return saved


def test_the_view_is_saved_once_where_the_run_begins_online(tmp_path, monkeypatch):
    saved = stand_in(monkeypatch)
    config = LogConfig(wandb="online", wandb_view=True)
    assert WandbTracker(tmp_path, config, {}, resumes=False).greeting == "wandb: https://run; view: https://view"
    (view,) = saved
    assert (view.entity, view.project, view.name) == ("team", "sorting", "first (1a)")
    assert [section.name for section in view.sections] == list(QUESTIONS)
    assert view.sections[2].panels[0].table_name == "samples"
    assert {line.x for section in view.sections for line in section.panels[1:]} == {"progress/step"}
    WandbTracker(tmp_path, config, {}, resumes=True)
    WandbTracker(tmp_path, LogConfig(wandb="online"), {}, resumes=False)
    assert len(saved) == 1


def test_a_view_that_cannot_be_saved_is_said_and_the_run_is_still_shown(tmp_path, monkeypatch):
    stand_in(monkeypatch, fails="no such\nteam")
    config = LogConfig(wandb="online", wandb_view=True)
    told = WandbTracker(tmp_path, config, {}, resumes=False).greeting
    assert told == "wandb: https://run; no view was saved: RuntimeError: no such team"


def test_wandb_s_own_package_takes_the_view():
    pytest.importorskip("wandb_workspaces")
    spec = make_view("team", "sorting", "first", "1a")._to_model().model_dump_json(by_alias=True)
    assert all(question in spec for question in QUESTIONS) and spec.count('"Run History Line Plot"') == sum(
        len(section) for section in plots().values()
    )
