"""The alarms that were said, in a file of the run's folder. Needs no torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from hybrid_grpo.records.files import read_jsonl, replace_text

ALARMS_FILE = "alarms.jsonl"
"""In a run's folder: every alarm that was said, one JSON object a line, with `step`, `alarm` (its name), `since` (the
first step of what was seen), `message` and `action`."""


@dataclass(frozen=True)
class Said:
    """An alarm that went off."""

    step: int
    alarm: str
    since: int
    message: str
    action: str = "say"


def write_alarm(folder: Path, said: Said) -> None:
    """Add an alarm to those of a run's folder."""
    with (folder / ALARMS_FILE).open("a", encoding="utf-8") as file:
        print(json.dumps(vars(said), ensure_ascii=False), file=file)


def forget_alarms(folder: Path, done: int) -> None:
    """Leave only the alarms up to a step in a run's folder."""
    if (folder / ALARMS_FILE).exists():
        alarms = read_jsonl(folder / ALARMS_FILE)
        kept = (json.dumps(alarm, ensure_ascii=False) + "\n" for alarm in alarms if alarm["step"] <= done)
        replace_text(folder / ALARMS_FILE, "".join(kept))
