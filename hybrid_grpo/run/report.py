"""report.html: what a run did, on one page that needs no network.

Reads the run's folder (config.yaml, metrics.jsonl, rollouts/) and decides what the page shows; `charts.yaml` lists its
charts, and `report.html.j2` decides how all looks. Whatever the folder does not have is left out of the page. Nothing
here is needed to train.
"""

import difflib
import json
import re
import statistics
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import yaml

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.run.catalogue import describe, duration, find
from hybrid_grpo.run.charts import charts_of, is_noisy
from hybrid_grpo.run.files import read_jsonl, replace_text, rollout_files

Line = dict[str, Any]
"""One line of metrics.jsonl."""

MAX_POINTS = 1000
"""Points of a curve; longer runs are thinned."""
GROUPS_SHOWN = 3
TEXT_SHOWN = 4000
"""Characters of a prompt or completion."""


PARTS = ("generate", "reward_wait", "reference", "train", "switch")
"""What a step's time is spent on, by metric `time/<part>_s`; the rest of `time/step_s` is `other`."""


_IMPROVED = ("reward/mean", "sft/loss", "reward_model/heldout_accuracy", "reward_model/loss")
"""What a run is about where it has no accuracy of completions."""


def write_report(run_dir: Path) -> Path:
    """Make `report.html` in the folder of a run, and return its path; raises UserError where it has no metrics."""
    lines = read_jsonl(run_dir / "metrics.jsonl")
    if not lines:
        raise UserError(f"{run_dir} has no metrics.jsonl with a step in it: give the folder of a run")
    config_path = run_dir / "config.yaml"
    config_text = config_path.read_text(encoding="utf-8") if config_path.exists() else ""
    thinned = thin(lines, MAX_POINTS)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("report.html.j2").render(
        name=run_dir.resolve().name,
        date=datetime.fromtimestamp((run_dir / "metrics.jsonl").stat().st_mtime).strftime("%d %B %Y, %H:%M"),
        facts=facts(config_text),
        numbers=key_numbers(lines),
        shares=time_shares(lines),
        samples=samples(run_dir / "rollouts"),
        config_text=config_text,
        data={"steps": [line["step"] for line in thinned], "charts": charts(thinned), "times": times(thinned)},
    )
    path = run_dir / "report.html"
    replace_text(path, page)
    return path


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


def charts(lines: list[Line]) -> list[dict[str, Any]]:
    """The charts that have any data, with their curves, captions and units."""
    known = list(dict.fromkeys(name for line in lines for name, value in line.items() if value is not None))
    drawn = []
    for chart in charts_of(known):
        caption = describe(chart.band).meaning if chart.band else ""
        curves = [
            {"label": c.label, "meaning": c.meaning, "noisy": c.noisy, "values": _column(c.name, lines)}
            for c in chart.curves
        ]
        drawn.append(
            {
                "section": chart.section,
                "title": chart.title,
                "top": chart.top,
                "unit": chart.unit,
                "curves": [_compared(curve) for curve in curves] if chart.compared else curves,
                "band": _column(chart.band, lines) if chart.band else None,
                "band_caption": caption and f"Band: {caption[0].lower()}{caption[1:]}",
            }
        )
    return drawn


def _compared(curve: dict[str, Any]) -> dict[str, Any]:
    """The curve with `drawn`, its values as shares of the way from its lowest to its highest one."""
    values = [value for value in curve["values"] if value is not None]
    low, high = min(values), max(values)
    drawn = [None if value is None else (value - low) / (high - low or 1.0) for value in curve["values"]]
    return {**curve, "drawn": drawn}


def _column(name: str, lines: list[Line]) -> list[float | None]:
    return [line.get(name) for line in lines]


def step_parts(line: Line) -> dict[str, float]:
    """Seconds of a step by part, with `other` for what no timer covers; empty for a line without a step."""
    total = line.get("time/step_s")
    if not total:
        return {}
    parts = {part: line.get(f"time/{part}_s") or 0.0 for part in PARTS}
    return {**parts, "other": max(0.0, total - sum(parts.values()))}


def times(lines: list[Line]) -> list[dict[str, Any]]:
    """The layers of the time chart, without parts that never take time; none where only one step was timed."""
    parts = [step_parts(line) for line in lines]
    if sum(map(bool, parts)) < 2:
        return []
    layers = [{"label": part, "values": [step.get(part) for step in parts]} for part in (*PARTS, "other")]
    return [{**layer, "color": color} for color, layer in enumerate(layers) if any(layer["values"])]


def time_shares(lines: list[Line]) -> list[dict[str, Any]]:
    """Seconds and share of each part over the whole run."""
    parts = [step_parts(line) for line in lines]
    totals = {part: sum(step.get(part, 0.0) for step in parts) for part in (*PARTS, "other")}
    whole = sum(totals.values())
    return [
        {
            "label": part.replace("_", " "),
            "meaning": "What no timer covers." if part == "other" else describe(f"time/{part}_s").meaning,
            "color": color,
            "share": seconds / whole,
            "time": duration(seconds),
        }
        for color, (part, seconds) in enumerate(totals.items())
        if seconds
    ]


def key_numbers(lines: list[Line]) -> list[dict[str, str]]:
    """The numbers at the head of the page: what improved, and what it cost."""
    series: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if value is not None:
                series.setdefault(name, []).append((line["step"], value))
    improved = [name for name in series if re.fullmatch(r"eval/[^/]+/accuracy", name)]
    improved = improved or [name for name in _IMPROVED if name in series]
    spent = {"steps": f"{lines[-1]['step']:,}"}
    if "progress/completions" in series:
        spent["completions"] = f"{series['progress/completions'][-1][1]:,.0f}"
    if "throughput/generated_tokens_per_s" in series:
        rate = statistics.median(value for _, value in series["throughput/generated_tokens_per_s"])
        spent["generated tokens/s, median"] = f"{rate:,.0f}"
    seconds = sum(value for name in ("step", "eval", "checkpoint") for _, value in series.get(f"time/{name}_s", ()))
    if seconds:
        spent["wall time"] = duration(seconds)
    return [
        *(_change(name, series[name]) for name in improved),
        *({"label": label, "value": value} for label, value in spent.items()),
    ]


def _change(name: str, points: list[tuple[int, float]]) -> dict[str, str]:
    step, best = (min if name.endswith("/loss") else max)(points, key=lambda point: point[1])
    return {
        "label": f"{name.split('/')[1]} accuracy" if name.startswith("eval/") else name.replace("/", " "),
        "before": f"{points[0][1]:.3f}" if len(points) > 1 else "",
        "value": f"{points[-1][1]:.3f}",
        "note": f"best {best:.3f} at step {step:,}",
    }


def facts(config_text: str) -> list[tuple[str, str]]:
    """Name and value of what identifies the run: `# name: value` comments of config.yaml, then its main settings."""
    found = re.findall(r"^# ?([\w ]+): (.+)$", config_text, re.MULTILINE)
    config = yaml.safe_load(config_text) or {}
    for label, path in (
        ("model", "policy.model"),
        ("data", "data.path"),
        ("learning rate", "policy.lr"),
        ("prompts a step", "rollout.prompts_per_step"),
        ("completions a prompt", "rollout.num_generations"),
        ("longest completion", "rollout.max_completion_tokens"),
        ("loss", "grpo.loss_type"),
        ("KL weight", "grpo.beta"),
        ("batch size", "sft.batch_size"),
        ("pairs a step", "reward.batch_size"),
        ("seed", "run.seed"),
    ):
        section, setting = path.split(".")
        if setting in (config.get(section) or {}):
            found.append((label, str(config[section][setting])))
    return found


def samples(folder: Path) -> list[dict[str, Any]]:
    """From the first, the middle and the last saved step: the groups whose rewards differ most, with their best and
    worst completions."""
    files = list(rollout_files(folder).items())
    chosen = dict(files[index] for index in (0, len(files) // 2, -1)) if files else {}
    steps = [(step, read_jsonl(path)) for step, path in chosen.items()]
    return [{"step": step, "groups": _groups(rows)} for step, rows in steps if rows]


def _groups(rows: list[Line]) -> list[dict[str, Any]]:
    pairs = []
    for _, group in groupby(rows, key=lambda row: row["group"]):
        members = list(group)
        # A completion that a reward function failed on is neither best nor worst.
        scored = [row for row in members if row["reward"] is not None] or members
        pairs.append((max(scored, key=_reward), min(scored, key=_reward), len(members)))
    pairs.sort(key=lambda pair: _reward(pair[1]) - _reward(pair[0]))
    return [_pair(best, worst, size) for best, worst, size in pairs[:GROUPS_SHOWN]]


def _reward(row: Line) -> float:
    return row["reward"] or 0.0


def _pair(best: Line, worst: Line, size: int) -> dict[str, Any]:
    prompt = best["prompt"]
    if not isinstance(prompt, str):
        prompt = _chat(prompt)
    texts = [_said(row)[:TEXT_SHOWN] for row in (best, worst)]
    left, right = differing(*texts)
    completions = [
        {**row, "kind": kind, "segments": segments, "hidden": max(0, len(_said(row)) - TEXT_SHOWN)}
        for row, kind, segments in ((best, "best", left), (worst, "worst", right))
    ]
    equal = _reward(best) == _reward(worst)
    return {
        "prompt": prompt[:TEXT_SHOWN],
        "prompt_id": best["prompt_id"],
        "size": size,
        "equal": equal,
        "completions": completions[:1] if equal else completions,
    }


def _said(row: Line) -> str:
    """A completion as text; the turns of a conversation each with who says it."""
    messages: list[Line] = row.get("messages", [])
    return _chat(messages) if len(messages) > 1 else str(row["completion"])


def _chat(messages: list[Line]) -> str:
    return "\n\n".join(f"{message.get('role')}: {_message(message)}" for message in messages)


def _message(message: Line) -> str:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [f"{function['name']}({json.dumps(function['arguments'])})" for function in functions]
    return "\n".join([str(message.get("content") or ""), *calls]).strip()


Segments = list[tuple[str, bool]]
"""A text in pieces, each with whether it differs from the other text."""


def differing(left: str, right: str) -> tuple[Segments, Segments]:
    """Both texts in pieces, by words, short ones by characters; texts with little in common are left whole."""
    pattern = r"." if max(len(left), len(right)) <= 40 else r"\s+|\w+|[^\w\s]"
    words = [re.findall(pattern, text, re.DOTALL) for text in (left, right)]
    matcher = difflib.SequenceMatcher(None, words[0], words[1], autojunk=False)
    if matcher.quick_ratio() < 0.5 or matcher.ratio() < 0.5:
        return [(left, False)] if left else [], [(right, False)] if right else []
    codes = matcher.get_opcodes()
    return (
        [("".join(words[0][i1:i2]), tag != "equal") for tag, i1, i2, _, _ in codes if i2 > i1],
        [("".join(words[1][j1:j2]), tag != "equal") for tag, _, _, j1, j2 in codes if j2 > j1],
    )
