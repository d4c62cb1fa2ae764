"""Writes report.html: the page of `watch` for one run as a single file, which needs neither a server nor a network.

The file contains the answers to the page's questions, with fewer points and for some steps only; `page/frozen.js` looks
them up. Whatever the run's folder lacks is left out. Nothing here is needed to train.
"""

import base64
import html
import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from starlette.datastructures import QueryParams

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.records.files import json_safe, replace_text
from hybrid_grpo.records.json_lines import Record
from hybrid_grpo.records.thumbnails import shown
from hybrid_grpo.watch import rollouts
from hybrid_grpo.watch.answers import Answers
from hybrid_grpo.watch.folders import Folders
from hybrid_grpo.watch.watched_run import AXES, WatchedRun

_PAGE = Path(__file__).parent / "page"
_POINTS = 300
"""Approximate number of points of a curve."""
_BYTES, _LARGEST = 250_000, 2**21
"""Maximum size of a step's completions, including their tokens, and the same if there are only one or two."""
_WITH_TOKENS = 16
"""Number of completions of a step that may include their tokens, which take time to read."""
_READ_S = 60.0
"""Maximum number of seconds for reading a large run's metrics."""
_POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
"""Content security policy that keeps the file from loading anything from a network, whatever completions contain."""


def write_report(folder: Path) -> Path:
    """Write `report.html` to the folder of a run, and return its path. Raise UserError if the run has no metrics."""
    folders = Folders([folder])
    run = next(iter(folders.runs.values())) if (folder / "metrics.jsonl").is_file() else None
    if run is not None:
        run.refresh(_READ_S)
    if run is None or not run.table.rows:
        raise UserError(f"{folder} has no metrics.jsonl with a step in it: give the folder of a run")
    path = folder / "report.html"
    text = _in_one_file(run.name, _frozen(run, Answers(folders)))
    try:
        replace_text(path, text)
    except OSError as error:
        problem = f"{error.filename or path} cannot be written: {error.strerror}: remove what is in its place, make"
        raise UserError(f"{problem} room, or print a summary with hybrid-grpo report {folder} --text") from None
    return path


def _frozen(run: WatchedRun, answers: Answers) -> dict[str, Any]:
    """Return the answers to the page's questions about the run, by question; see page/frozen.js."""

    def ask(question: str, **given: Any) -> Any:
        return getattr(answers, question)(QueryParams({"run": run.name, **given}))

    files = run.rollouts()
    saved = sorted({list(files)[at] for at in (0, len(files) // 2, -1)}) if files else []
    runs = ask("runs")
    # The file is the same wherever and whenever it is written, and never says that the run is still training. What
    # the run has printed stays at home.
    nowhere = dict.fromkeys(("age", "state", "step_seconds", "started", "written"))
    outline = {**runs["runs"][0], **nowhere, "folder": run.name, "last": ""}
    written = datetime.fromtimestamp((run.folder / "metrics.jsonl").stat().st_mtime)
    opened = {**runs["open"][0], "version": 0, "details": 0, "read": 1}
    newest = ask("step")
    traces = [ask("step", step=step) for step in saved] + [newest]
    steps = {one["details"]["step"]: one for one in traces if one["details"]}
    return {
        "written": f"{written:%d %B %Y, %H:%M}", "runs": {"runs": [outline], "open": [opened]}, "charts": ask("charts"),
        "curves": _curves(run, ask), "alarms": ask("alarms"), "settings": ask("settings"), "console": [],
        "times": ask("times"),
        "samples": {
            "steps": [min(files), max(files)] if files else None,
            "count": len(files),
            "kept": saved,
            "rows": [row for step in saved for row in _samples(run.folder, step, files[step])],
        },
        "step": {
            "steps": newest["steps"],
            "kept": [
                {"details": {name: one["details"].get(name) for name in ("step", "stages")}}
                for _, one in sorted(steps.items())
            ],
        },
    }  # fmt: skip


def _curves(run: WatchedRun, ask: Any) -> dict[str, Any]:
    """Return the curves over steps, the values of the axes at some steps, and the x positions that curves share."""
    names = [name for name in run.table.names if name != "step"]
    places: dict[tuple[float, ...], int] = {}
    curves: dict[str, Any] = {}
    for name in names:
        found = ask("curves", name=name, points=_POINTS)[run.name]["curves"][name]
        curves[name] = {
            part: [places.setdefault(tuple(map(_short, x)), len(places)), [_short(value) for value in y]]
            for part, (x, y) in found.items()
        }
    rows = np.unique(np.linspace(0, run.table.rows - 1, min(run.table.rows, 2 * _POINTS)).astype(int))
    axes = {axis: [float(f"{x:.7g}") for x in run.axis(axis)[rows].tolist()] for axis in AXES}
    return {"curves": curves, "places": list(places), "axes": axes}


def _short(value: float) -> float | int:
    """Shorten a number of a curve: keep integers as they are, and more digits of others than the page shows."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.7g}")


def _samples(folder: Path, step: int, path: Path) -> Iterator[dict[str, Any]]:
    """Yield as many completions of a step as fit in `_BYTES`, each with its `row` in the list, `all` that was saved,
    `tokens`, and `rival` (see `rivals`). The best and the worst of each group come first, starting with the groups
    whose rewards differ most. The first `_WITH_TOKENS` have tokens if these fit. The first two are yielded in any case,
    unless they exceed `_LARGEST` bytes."""
    rewards = rollouts.read_rewards(path)
    compared = rollouts.rivals(rewards)
    ends = {other for _, other in compared.values()}

    def importance(offset: int) -> tuple[bool, float]:
        _, other = compared.get(offset, ("", offset))
        own, others = rewards[offset][1], rewards[other][1]
        difference = 0.0 if own is None or others is None else abs(own - others)
        return offset in ends, difference

    groups: dict[str, list[float | None]] = {}
    for group, reward in rewards.values():
        groups.setdefault(group, []).append(reward)
    left = _BYTES
    for count, offset in enumerate(sorted(rewards, key=importance, reverse=True)):
        row = rollouts.read_row(path, offset)
        if row is None:  # the file has changed
            return
        number = rollouts.line_number(path, offset) if count < _WITH_TOKENS else None
        record = None if number is None else rollouts.read_tokens(folder, step, number, row.get("sample"))
        row |= {"pictures": shown(folder, row)}
        summary = {**rollouts.summarize(row, step, offset), "rewards": groups[rewards[offset][0]]}
        sample = {"row": summary, "all": row, "rival": compared.get(offset)}
        found = {**sample, "tokens": _rounded(record)}
        if (size := len(json.dumps(found))) > left:
            found = {**sample, "tokens": None}
            size = len(json.dumps(found))
        left -= size
        if (left < 0 and count >= 2) or left < -_LARGEST:
            return
        yield found


def _rounded(record: Record | None) -> Record | None:
    """Round measures of tokens to the 6 digits that are shown, but `logp`, of which probabilities are made, to 12."""
    if record is None:
        return None
    measures = {
        name: [
            float(f"{value:.{12 if name == 'logp' else 6}g}") if isinstance(value, float) else value for value in values
        ]
        for name, values in record["measures"].items()
    }
    return {**record, "measures": measures}


def _in_one_file(name: str, frozen: dict[str, Any]) -> str:
    """Return the page with everything that it loads. Its modules become entries of an import map, by their names."""
    # Escaped, so that no text of a run can close the script element.
    data = json.dumps(json_safe(frozen), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    files = [path.name for path in sorted(_PAGE.glob("*.js")) if path.name != "theme.js"]
    texts = {name: re.sub(r'from "\./([^"]+)"', r'from "\1"', _read(name)).encode() for name in files}
    modules = {file: f"data:text/javascript;base64,{base64.b64encode(text).decode()}" for file, text in texts.items()}
    styles = "\n".join(_read(file) for file in ("uplot/uplot.css", "style.css"))
    scripts = [_read("theme.js"), f"/*!\n{_read('uplot/LICENSE')}*/\n{_read('uplot/uplot.js')}"]
    head = [
        f'<meta http-equiv="content-security-policy" content="{_POLICY}">', f"<style>\n{styles}</style>",
        *(f"<script>\n{script}</script>" for script in scripts),
        f'<script type="application/json" id="frozen">{data}</script>',
        f'<script type="importmap">{json.dumps({"imports": modules})}</script>',
        '<script type="module">import "main.js";</script>',
    ]  # fmt: skip
    page = re.sub(r'<script[^>]* src="[^"]*"></script>\n|<link rel="stylesheet"[^>]*>\n', "", _read("index.html"))
    page = page.replace("<title>Runs", f"<title>{html.escape(name)}").replace("<html ", "<html data-frozen ")
    before, after = page.split("</head>")
    return "\n".join([before.rstrip(), *head, "</head>" + after])


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")
