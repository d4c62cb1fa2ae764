"""Answers the questions of the watch page about runs from the runs' folders, without writing to them.

An answer takes a fraction of a second at most for reading; if a file needs more, the page asks again.
"""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException

from hybrid_grpo.records.charts.charts import STEP_PARTS, Chart, Curve, charts_of, is_noisy
from hybrid_grpo.records.charts.thinning import clip, present, smooth, thin
from hybrid_grpo.records.files import TRACE_FILE, json_safe
from hybrid_grpo.records.metrics.catalogue import describe, find
from hybrid_grpo.records.thumbnails import shown
from hybrid_grpo.watch import rollouts
from hybrid_grpo.watch.folders import Folders
from hybrid_grpo.watch.metrics_file import first_step, read_step
from hybrid_grpo.watch.settings import compared
from hybrid_grpo.watch.table import Table
from hybrid_grpo.watch.watched_run import AXES, WatchedRun

_READ_S = 0.25
"""Seconds that an answer may spend on reading files of metrics, for all of its runs together."""
_LIST_S = 0.1
"""Seconds that an answer may spend on reading what the list shows of runs."""
_WAIT_S = 10.0
"""Seconds that a question waits for another question about the same run."""
_TIME_COLUMNS = 240


class Answers:
    """Has one public method for each question of the page, with the parameters of the request as `given`."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders

    def answer(self, question: str, given: QueryParams) -> Any:
        """Answer a question, on any thread. Questions about the same run wait for each other."""
        known = self._folders.runs
        with ExitStack() as held:
            for name in sorted(set(given.getlist("run")) & known.keys()):
                if not known[name].lock.acquire(timeout=_WAIT_S):
                    raise HTTPException(503, f"{name} is still being read")
                held.callback(known[name].lock.release)
            return getattr(self, question)(given)

    def runs(self, given: QueryParams) -> Any:
        """Return all runs, the newest metrics of the runs that are open (parameter `run`, repeated), and the folders
        in which runs are looked for."""
        known = self._folders.look()
        opened = [known[name] for name in given.getlist("run") if name in known]
        for run in opened:
            run.refresh(_READ_S / len(opened))
        open_now = [
            {
                **run.summary(), "version": run.version, "details": run.changed_ms(TRACE_FILE),
                "read": run.numbers.share_read, "damaged": run.numbers.damaged,
            }
            for run in opened
        ]  # fmt: skip
        deadline = time.monotonic() + _LIST_S
        # If there are too many runs to look at, the others have their turn when the page asks again.
        outlines = [run.outline(time.monotonic() < deadline) for run in known.values()]
        return {"runs": outlines, "open": open_now, "folders": self._folders.named}

    def charts(self, given: QueryParams) -> Any:
        """Return the charts of runs by section; metrics that are not in charts.yaml come last, one in each chart. A
        chart is `folded`, for a reason, if nothing but zeros has been measured of its curves, or if other curves show
        the same numbers: with one reward function, its mean is the reward."""
        runs = self._runs(given)
        known = list(dict.fromkeys(name for run in runs for name in run.table.names if name != "step"))
        charts = charts_of(known)
        drawn = {curve.name for chart in charts for curve in chart.curves}
        charts += [_lone_chart(name) for name in sorted(known) if name not in drawn]
        heard = frozenset(name for run in runs for name in run.table.heard())
        shown: list[str] = []
        bands = {
            chart.band: {"name": chart.band, "meaning": describe(chart.band).meaning} for chart in charts if chart.band
        }
        return [
            {**asdict(chart), "folded": _why_folded(chart, heard, shown, runs), "band": bands.get(chart.band or "")}
            for chart in charts
        ]

    def curves(self, given: QueryParams) -> Any:
        """Return the curves of metrics (parameter `name`, repeated), by run and name: their points in a range of an
        axis, thinned, and also smoothed if the metric is noisy."""
        axis = given.get("axis", "step")
        if axis not in AXES:
            raise HTTPException(400, f"axis {axis} must be one of {', '.join(AXES)}")
        low, high = _number(given, "low"), _number(given, "high")
        runs, names = self._runs(given), given.getlist("name")
        points = int(max(2, _number(given, "points") or 600))
        window = _number(given, "window")
        answer: dict[str, Any] = {}
        for run in runs:
            x = run.axis(axis)
            curves = {}
            for name in names:
                curve = present(x, run.table.column(name))
                metric = find(name)
                width = len(curve[1]) // 25 if window is None else int(window)
                is_smoothed = metric is not None and is_noisy(metric) and len(curve[1]) > 20 and width > 1
                parts = {"raw": curve} | ({"smooth": (curve[0], smooth(curve[1], width))} if is_smoothed else {})
                least, most = -math.inf if low is None else low, math.inf if high is None else high
                thinned = {part: thin(clip(points_of, least, most), points) for part, points_of in parts.items()}
                curves[name] = {part: [axis.tolist() for axis in points_of] for part, points_of in thinned.items()}
            first, last = (float(x[0]), float(x[-1])) if x.size else (0, 0)
            answer[run.name] = {"curves": curves, "from": first, "to": last}
        return answer

    def alarms(self, given: QueryParams) -> Any:
        """Return the alarms of runs, with their positions on all axes."""
        return [alarm for run in self._runs(given) for alarm in _alarms(run)]

    def settings(self, given: QueryParams) -> Any:
        """Return the settings of runs with their defaults, the most important first, and each run's config.yaml."""
        configs = {run.name: run.config() for run in self._runs(given)}
        return {
            "settings": compared({name: settings for name, (_, settings) in configs.items()}),
            "texts": {name: text for name, (text, _) in configs.items()},
        }

    def samples(self, given: QueryParams) -> Any:
        """Return the completions of one run that match a search: the newest first, or ordered by a number (`order`,
        and `rising` if the lowest come first)."""
        run, order = self._run(given), given.get("order", "")
        if order not in ("", *rollouts.ORDERS):
            raise HTTPException(400, f"order {order} must be one of {', '.join(rollouts.ORDERS)}")
        query = rollouts.Query(
            text=given.get("text", ""), finish=given.get("finish", ""), least=_number(given, "least"),
            most=_number(given, "most"), first=_whole(given, "first"), last=_whole(given, "last"),
            prompt=_whole(given, "prompt"),
        )  # fmt: skip
        step, offset = _whole(given, "step"), _whole(given, "offset")
        start = None if step is None or offset is None or offset < 0 else (step, offset)
        files = run.rollouts()
        found = rollouts.search(files, query, start, order=(order, bool(given.get("rising"))) if order else None)
        return {**vars(found), "steps": [min(files), max(files)] if files else None, "count": len(files)}

    def sample(self, given: QueryParams) -> Any:
        """Return a completion with everything that was saved about it, and copies of its prompt's pictures."""
        row = self._sample(given)[3]
        return {**row, "pictures": shown(self._run(given).folder, row)}

    def rival(self, given: QueryParams) -> Any:
        """Return the completion with which the requested one is compared: the best of its group, or the worst if it is
        the best itself; null if all rewards of the group are equal."""
        _, path, offset, _ = self._sample(given)
        kind, other = rollouts.rivals(rollouts.read_rewards(path)).get(offset, ("", -1))
        return {"kind": kind, "row": rollouts.read_row(path, other)} if kind else None

    def group(self, given: QueryParams) -> Any:
        """Return all completions of the requested completion's group, with their rewards and advantages."""
        _, path, offset, _ = self._sample(given)
        return rollouts.group_of(path, offset)

    def console(self, given: QueryParams) -> Any:
        """Return the last lines that one run has printed."""
        return self._run(given).console()

    def tokens(self, given: QueryParams) -> Any:
        """Return what was recorded about each token of a completion; null if nothing was."""
        step, path, offset, row = self._sample(given)
        number = rollouts.line_number(path, offset)
        folder = self._run(given).folder
        return None if number is None else rollouts.read_tokens(folder, step, number, row.get("sample"))

    def times(self, given: QueryParams) -> Any:
        """Return how one run's steps spent their time, as the layers of a stacked chart."""
        return time_layers(self._run(given).table, _TIME_COLUMNS)

    def step(self, given: QueryParams) -> Any:
        """Return the trace of a step of one run (default: the newest step), and the first and the newest step."""
        path = self._run(given).folder / TRACE_FILE
        found, newest = read_step(path, _whole(given, "step")), read_step(path, None)
        return json_safe({"details": found, "steps": [first_step(path), newest["step"]] if newest else None})

    def _sample(self, given: QueryParams) -> tuple[int, Path, int, dict[str, Any]]:
        """Return the requested completion: its step, its file, its offset in the file, and what was saved about it."""
        step, offset = _whole(given, "step"), _whole(given, "offset")
        path = self._run(given).rollouts().get(-1 if step is None else step)
        row = rollouts.read_row(path, offset) if path and offset is not None and offset >= 0 else None
        if step is None or path is None or offset is None or row is None:
            raise HTTPException(404, "there is no such completion (anymore)")
        return step, path, offset, row

    def _runs(self, given: QueryParams) -> list[WatchedRun]:
        known = self._folders.runs
        names = given.getlist("run")
        for name in names:
            if name not in known:
                raise HTTPException(404, f"there is no run {name}")
        return [known[name] for name in names]

    def _run(self, given: QueryParams) -> WatchedRun:
        runs = self._runs(given)
        if len(runs) != 1:
            raise HTTPException(400, "give one run")
        return runs[0]


QUESTIONS = [name for name in vars(Answers) if not name.startswith("_") and name != "answer"]


def _lone_chart(name: str) -> Chart:
    metric = find(name)
    title = name.replace("_", " ").replace("/", ", ")
    curve = Curve(name, name, metric.meaning if metric else "", metric is not None and is_noisy(metric))
    return Chart("More", title, metric.unit if metric else "", None, (curve,), None, False)


def _why_folded(chart: Chart, heard: frozenset[str], shown: list[str], runs: Sequence[WatchedRun]) -> str:
    """Return why a chart is folded away; if it is not, return "" and add its curves to those that are `shown`."""
    names = [curve.name for curve in chart.curves]
    rewards = [name for name in shown if name.startswith(("reward/", "eval/"))]
    again = (any(all(run.table.is_equal(name, other) for run in runs) for other in rewards) for name in names)
    repeats = [name not in shown and is_shown for name, is_shown in zip(names, again, strict=True)]
    if heard.isdisjoint(names):
        return "Nothing but 0 so far"
    # What a comparison adds is lost if one of its curves is shown by another name.
    if (any if chart.compared else all)(repeats):
        return "The same numbers as above"
    shown += names
    return ""


def _alarms(run: WatchedRun) -> list[dict[str, Any]]:
    steps = run.table.column("step")
    places = {axis: run.axis(axis) for axis in AXES}
    found = []
    for alarm in run.alarms() if steps.size else ():
        # An alarm is written before the numbers of its step.
        until = steps[-1] if alarm.until is None else alarm.until
        ends = [min(int(steps.searchsorted(step)), steps.size - 1) for step in (alarm.since, until)]
        at = {axis: [float(x[end]) for end in ends] for axis, x in places.items()}
        is_on = alarm.until is None
        found.append({"run": run.name, "alarm": alarm.alarm, "message": alarm.message, "on": is_on, "at": at})
    return found


def _number(given: QueryParams, name: str) -> float | None:
    text = given.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HTTPException(400, f"{name} {text} is not a number")
    return value


def _whole(given: QueryParams, name: str) -> int | None:
    value = _number(given, name)
    return None if value is None else min(int(value), 1 << 62)


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
