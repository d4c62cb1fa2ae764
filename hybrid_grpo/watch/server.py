"""The page's server: files of the page, and what it asks about runs, as JSON. It reads, and changes nothing.

A run is asked for by its name in the list of runs, never by a path. Questions are answered one after the other in one
thread; each reads for a fraction of a second at most, and the page asks again for more.
"""

import math
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybrid_grpo.run.catalogue import find
from hybrid_grpo.run.charts import Chart, Curve, charts_of, is_noisy
from hybrid_grpo.run.files import json_safe
from hybrid_grpo.watch.details_file import first_step, read_step
from hybrid_grpo.watch.folder import AXES, Run, differing
from hybrid_grpo.watch.folders import Folders
from hybrid_grpo.watch.prompt_rewards import ORDERS
from hybrid_grpo.watch.rollouts import Query, line_number, read_row, search
from hybrid_grpo.watch.thinning import clip, present, smooth, thin
from hybrid_grpo.watch.tokens import read_tokens

HOST = "127.0.0.1"
_PAGE = Path(__file__).parent / "page"
_READ_S = 0.25
"""Seconds of a request in which numbers are read, over all runs that it is about."""
_MOST_POINTS = 4000
_MOST_CELLS = 400
"""Rows and columns of a map."""
_HISTOGRAM_STEPS = 120
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""With the first one a browser asks no other machine for anything, whatever a completion says."""


def application(folders: Folders) -> Starlette:
    """The application that answers the page."""
    answers = _Answers(folders)
    questions = ("runs", "charts", "curves", "alarms", "settings", "samples", "sample", "tokens", "prompts", "step")
    return Starlette(
        routes=[
            *(Route(f"/api/{name}", getattr(answers, name)) for name in questions),
            Route("/", _index),
            Mount("/page", StaticFiles(directory=_PAGE)),
        ],
        # Other names would let a web page that was given this machine's address for its own read the runs.
        middleware=[
            Middleware(_Headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"]),
        ],
        exception_handlers={HTTPException: _refusal},
    )


def listen(port: int) -> socket.socket:
    """A socket that takes connections from this machine; 0 is a free port. Raises OSError where that is impossible."""
    return socket.create_server((HOST, port))


def serve(app: Starlette, listener: socket.socket, announce: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; `announce` is called as soon as a signal would end the server as it should."""
    server = uvicorn.Server(
        uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1)
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        # After its end uvicorn restores these handlers and raises the signal again: that must do nothing.
        signal.signal(number, server.handle_exit)
    announce()
    server.run([listener])


async def _index(request: Request) -> Response:
    return FileResponse(_PAGE / "index.html")


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


class _Headers:
    """Adds `_HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self._app(scope, receive, send_with)


class _Answers:
    """One method for each question of the page."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders

    async def runs(self, request: Request) -> Response:
        """All runs; of those that are open (`run`, repeated) also their numbers, after reading on."""
        known = self._folders.look()
        opened = [known[name] for name in request.query_params.getlist("run") if name in known]
        for run in opened:
            run.refresh(_READ_S / len(opened))
        open_now = [
            {
                **run.summary(),
                "version": run.version,
                "details": run.details.changed_ms,
                "read": run.share_read,
                "damaged": run.damaged,
            }
            for run in opened
        ]
        return JSONResponse({"runs": [run.outline() for run in known.values()], "open": open_now})

    async def charts(self, request: Request) -> Response:
        """The charts of runs by section; metrics that charts.yaml does not draw come last, each by itself."""
        runs = self._runs(request)
        known = list(dict.fromkeys(name for run in runs for name in run.table.names if name != "step"))
        charts = [chart for chart in charts_of(known) if not chart.compared]  # the page has one axis for all curves
        drawn = {curve.name for chart in charts for curve in chart.curves}
        charts += [_lone_chart(name) for name in sorted(known) if name not in drawn]
        return JSONResponse([_chart(chart) for chart in charts])

    async def curves(self, request: Request) -> Response:
        """Points of metrics (`name`, repeated) of runs, by run and name: on an axis, in a range of it, thinned and
        smoothed."""
        axis = request.query_params.get("axis", "step")
        if axis not in AXES:
            raise HTTPException(400, f"axis {axis} must be one of {', '.join(AXES)}")
        low, high = _number(request, "low"), _number(request, "high")
        points = int(min(_MOST_POINTS, max(2, _number(request, "points") or 600)))
        window = _number(request, "window")
        answer: dict[str, Any] = {}
        for run in self._runs(request):
            x = run.axis(axis)
            curves = {}
            for name in request.query_params.getlist("name"):
                curve = present(x, run.table.column(name))
                metric = find(name)
                width = len(curve[1]) // 25 if window is None else int(window)
                is_smoothed = metric is not None and is_noisy(metric) and len(curve[1]) > 20 and width > 1
                parts = {"raw": curve} | ({"smooth": (curve[0], smooth(curve[1], width))} if is_smoothed else {})
                bounds = (-math.inf if low is None else low, math.inf if high is None else high)
                thinned = {part: thin(clip(points_of, *bounds), points) for part, points_of in parts.items()}
                curves[name] = {part: [axis.tolist() for axis in points_of] for part, points_of in thinned.items()}
            answer[run.name] = {"curves": curves, "from": float(x[0]) if x.size else 0, "to": _end(x)}
        return JSONResponse(answer)

    async def alarms(self, request: Request) -> Response:
        """When alarms were on, with their places on all axes."""
        return JSONResponse([alarm for run in self._runs(request) for alarm in _alarms(run)])

    async def settings(self, request: Request) -> Response:
        """Settings that differ between runs, and config.yaml of each."""
        runs = self._runs(request)
        texts = {run.name: run.config_text for run in runs}
        return JSONResponse({"differing": differing(runs) if len(runs) > 1 else [], "texts": texts})

    async def samples(self, request: Request) -> Response:
        """Completions of one run that fit a search."""
        run, given = self._run(request), request.query_params
        query = Query(
            text=given.get("text", ""),
            finish=given.get("finish", ""),
            least=_number(request, "least"),
            most=_number(request, "most"),
            first=_whole(request, "first"),
            last=_whole(request, "last"),
            prompt=_whole(request, "prompt"),
        )
        step, offset = _whole(request, "step"), _whole(request, "offset")
        start = None if step is None or offset is None or offset < 0 else (step, offset)
        files = run.rollouts()
        found = search(files, query, start)
        ends = [min(files), max(files)] if files else None
        return JSONResponse({"rows": found.rows, "read": found.read, "next": found.next, "steps": ends})

    async def sample(self, request: Request) -> Response:
        """One completion with all that was saved of it."""
        return JSONResponse(self._sample(request)[3])

    async def tokens(self, request: Request) -> Response:
        """What was recorded about each token of a completion; null where nothing was."""
        step, path, offset, row = self._sample(request)
        number, sample = line_number(path, offset), row.get("sample")
        return JSONResponse(read_tokens(self._run(request).folder, step, number, sample))

    async def prompts(self, request: Request) -> Response:
        """Mean rewards of one run's prompts over its steps, in cells: of prompts `low` to `high` (excluded) in their
        order, and of steps `first` to `last`."""
        run, order = self._run(request), request.query_params.get("order", "")
        if order not in ("", *ORDERS):
            raise HTTPException(400, f"order {order} must be one of {', '.join(ORDERS)}")
        run.details.read(_READ_S)
        rewards = run.details.rewards
        order = order or rewards.telling_order
        low, high = _range(request, "low", "high", 0, len(rewards))
        first, last = _range(request, "first", "last", rewards.first, rewards.last)
        rows, columns = (min(_MOST_CELLS, max(1, _whole(request, name) or 100)) for name in ("rows", "columns"))
        cells = rewards.map(order, low, high, first, last, rows, columns)
        return JSONResponse(
            {
                "read": run.details.share_read, "prompts": len(rewards), "steps": [rewards.first, rewards.last],
                "low": low, "high": high, "first": first, "last": last, "counts": cells.counts.tolist(),
                "means": [[_short(mean) for mean in row] for row in cells.means.tolist()],
                "tall": cells.tall, "wide": cells.wide, "order": order,
                "names": rewards.ordered(order)[low:high].tolist() if cells.tall == 1 else None,
            }
        )  # fmt: skip

    async def step(self, request: Request) -> Response:
        """What one run noted of a step (without `step`: the newest), and its histograms over all steps."""
        run, step = self._run(request), _whole(request, "step")
        run.details.read(_READ_S)
        path, histograms = run.details.path, run.details.histograms
        found, newest = read_step(path, step), read_step(path, None)
        near = histograms.near(found["step"]) if found else None
        over_time = {
            name: {
                "steps": over.steps, "edges": over.edges.tolist(),
                "shares": [[_short(share) for share in row] for row in over.shares.tolist()],
            }
            for name, over in histograms.over_time(_HISTOGRAM_STEPS).items()
        }  # fmt: skip
        return JSONResponse(
            json_safe(
                {
                    "read": run.details.share_read, "details": found, "over_time": over_time,
                    "steps": [first_step(path), newest["step"]] if newest else None,
                    "histograms": {"step": near[0], "by_name": near[1]} if near else None,
                }
            )
        )  # fmt: skip

    def _sample(self, request: Request) -> tuple[int, Path, int, dict[str, Any]]:
        """The completion that is asked for: its step, its file, where it begins there, and what was saved of it."""
        step, offset = _whole(request, "step"), _whole(request, "offset")
        path = self._run(request).rollouts().get(-1 if step is None else step)
        row = read_row(path, offset) if path and offset is not None and offset >= 0 else None
        if step is None or path is None or offset is None or row is None:
            raise HTTPException(404, "there is no such completion (any more)")
        return step, path, offset, row

    def _runs(self, request: Request) -> list[Run]:
        known = self._folders.runs
        names = request.query_params.getlist("run")
        for name in names:
            if name not in known:
                raise HTTPException(404, f"there is no run {name}")
        return [known[name] for name in names]

    def _run(self, request: Request) -> Run:
        runs = self._runs(request)
        if len(runs) != 1:
            raise HTTPException(400, "give one run")
        return runs[0]


def _range(request: Request, low: str, high: str, start: int, end: int) -> tuple[int, int]:
    """Two numbers of a question within `start` and `end`, which stand for those that are not given."""
    first, last = _whole(request, low), _whole(request, high)
    first = start if first is None else min(max(first, start), end)
    return first, end if last is None else min(max(last, first), end)


def _short(value: float) -> float | None:
    """A number as a screen can show it."""
    return None if math.isnan(value) else float(f"{value:.4g}")


def _end(x: Any) -> float:
    return float(x[-1]) if x.size else 0.0


def _lone_chart(name: str) -> Chart:
    metric = find(name)
    title = name.replace("_", " ").replace("/", ", ")
    curve = Curve(name, name, metric.meaning if metric else "", metric is not None and is_noisy(metric))
    return Chart("More", title, metric.unit if metric else "", None, (curve,), None, False)


def _chart(chart: Chart) -> dict[str, Any]:
    curves = [{"name": curve.name, "label": curve.label, "meaning": curve.meaning} for curve in chart.curves]
    return {"section": chart.section, "title": chart.title, "unit": chart.unit, "top": chart.top, "curves": curves}


def _alarms(run: Run) -> list[dict[str, Any]]:
    steps = run.table.column("step")
    places = {axis: run.axis(axis) for axis in AXES}
    found = []
    for alarm in run.alarms() if steps.size else ():
        # An alarm is written before the numbers of its step.
        ends = [min(int(steps.searchsorted(step)), steps.size - 1) for step in (alarm.first, alarm.last)]
        at = {axis: [float(x[end]) for end in ends] for axis, x in places.items()}
        found.append({"run": run.name, "alarm": alarm.name, "message": alarm.message, "at": at})
    return found


def _number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HTTPException(400, f"{name} {text} is no number")
    return value


def _whole(request: Request, name: str) -> int | None:
    value = _number(request, name)
    return None if value is None else int(value)
