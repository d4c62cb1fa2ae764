"""`report`: writes report.html of an existing run again, or prints a summary of the run as text."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from hybrid_grpo.config import to_dict
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.records.alarm_records import ALARMS_FILE, joined
from hybrid_grpo.records.files import flattened
from hybrid_grpo.records.json_lines import read_jsonl
from hybrid_grpo.records.publishing.card import ACCURACY, TrainedRun, differing
from hybrid_grpo.records.publishing.redaction import publishable, publishable_text

_FACTS = ("versions", "git commit", "device", "ranks", "batch", "memory", "attention", "data")
_MOST_KINDS, _LONGEST = 5, 200
_CLOSEST = "health/closest/"
_CURVES = ("reward/mean", "sft/loss", "time/step_s", "memory/peak_gb")
_USAGE = "usage: hybrid-grpo report RUN_FOLDER [--text]"
_HELP = f"""{_USAGE}

Write report.html of a run again. With --text, print a summary to paste into an issue instead: versions, changed
settings, speed, results and alarms, without secrets and without this machine's folders."""


def run(arguments: list[str]) -> None:
    """Write the report of a run, whose folder is the only argument besides `--text`."""
    if arguments in (["-h"], ["--help"]):
        print(_HELP)
        return
    names = [argument for argument in arguments if argument != "--text"]
    if len(names) != 1 or names[0].startswith("-"):
        raise UserError(_USAGE)
    folder = Path(names[0])
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder} is not the folder of a run: it has no metrics.jsonl")
    if "--text" in arguments:
        lines = _lines(TrainedRun(folder, folder / "model"))
        print("\n".join(line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..." for line in lines))
        return

    from hybrid_grpo.watch.frozen import write_report

    print(write_report(folder))


def _lines(run: TrainedRun) -> Iterator[str]:
    """Yield the summary of a run, finished or not."""
    command, method, cls = run.stage
    lines = read_jsonl(run.folder / "metrics.jsonl")
    done, steps = (lines[-1]["step"] if lines else 0), run.settings.get("run", {}).get("steps")
    ended = "finished" if run.model.is_dir() else "not finished"
    yield f"hybrid-grpo {command} ({method}): {done} of {steps} steps, {ended}"
    yield from (f"{name}: {run.facts[name]}" for name in _FACTS if name in run.facts)
    yield f"policy.model: {publishable(str(run.settings.get('policy', {}).get('model', '')))}"
    for name, value in flattened(publishable(differing(run.settings, to_dict(cls())))):
        yield f"{name}: {json.dumps(value, ensure_ascii=False)}"
    for name in (
        *_CURVES,
        *(name for name in dict.fromkeys(n for line in lines for n in line) if ACCURACY.fullmatch(name)),
    ):
        values = [line[name] for line in lines if line.get(name) is not None]
        if values:
            yield f"{name}: {values[0]:.4g} -> {values[-1]:.4g} (median {median(values):.4g} of {len(values)})"
    alarms = joined(read_jsonl(run.folder / ALARMS_FILE))
    ways = [(way, name, line["step"]) for line in lines for name, way in line.items() if name.startswith(_CLOSEST)]
    yield f"alarms: {len(alarms) or 'none'}"
    if ways and not alarms:
        way, name, step = max(ways)
        yield f"  closest: {name.removeprefix(_CLOSEST)}, {way:.0%} of the way to its limit at step {step}"
    newest = {alarm.alarm or alarm.message: alarm for alarm in alarms}
    for kind, alarm in list(newest.items())[-_MOST_KINDS:]:
        times = sum(kind in (other.alarm, other.message) for other in alarms)
        again = f" ({times} times)" if times > 1 else ""
        yield f"  step {alarm.step}: {publishable_text(alarm.message)}{again}"
