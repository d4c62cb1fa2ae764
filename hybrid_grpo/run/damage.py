"""What is damaged in a run's folder and is not a checkpoint: it is renamed, and the run goes on without it."""

import os
from pathlib import Path

from hybrid_grpo.records.alarm_records import ALARMS_FILE
from hybrid_grpo.records.files import replace_text, set_aside
from hybrid_grpo.records.json_lines import parse_step

_FILES = (
    *("config.yaml", "deepspeed.json", "metrics.jsonl", "details.jsonl", ALARMS_FILE, "prompts.jsonl"),
    *("report.html", "checkpoints/run_id"),
)
_FOLDERS = ("rollouts", "journal", "profile", "model", "model_best", "model_ema")
_OF_FILES = ("rollouts", "journal")
"""Folders that hold nothing but files."""


def set_aside_damaged(folder: Path, *, numbers: bool = False) -> list[str]:
    """Set aside what is not a file or folder where one should be, alarms that cannot be read, and with `numbers`
    metrics.jsonl; returns a line for each."""
    others = [folder / name for name in _FILES if not (folder / name).is_file()]
    others += [folder / name for name in _FOLDERS if not (folder / name).is_dir()]
    for name in _OF_FILES:
        inside = sorted((folder / name).iterdir()) if (folder / name).is_dir() else ()
        others += [path for path in inside if not path.is_file() and not path.name.startswith((".", "damaged_"))]
    said = [_moved(path, "it is not a file or folder of a run") for path in others if os.path.lexists(path)]
    if numbers and (folder / "metrics.jsonl").is_file():
        said.append(_moved(folder / "metrics.jsonl", "it is damaged"))
    alarms = folder / ALARMS_FILE
    if alarms.is_file():
        # The last line may have been cut by a crash.
        lines = alarms.read_bytes().split(b"\n")[:-1]
        whole = [line for line in lines if parse_step(line)]
        if len(whole) < len(lines):
            said.append(_moved(alarms, f"{len(lines) - len(whole)} of its lines cannot be read, the others are kept"))
            replace_text(alarms, "".join(line.decode() + "\n" for line in whole))
    return said


def _moved(path: Path, why: str) -> str:
    return f"WARNING: {path}: {why}; it is kept as {set_aside(path).name}"
