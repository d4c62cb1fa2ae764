"""Records the alarms that went off in a file in the run's folder. This module does not import torch."""

import json
from dataclasses import dataclass
from pathlib import Path

ALARMS_FILE = "alarms.jsonl"
"""Name of the file, which has one JSON object with the fields of `AlarmRecord` per alarm that went off."""


@dataclass(frozen=True)
class AlarmRecord:
    """An alarm that went off."""

    step: int
    alarm: str
    """Name of the alarm."""
    since: int
    """The step at which the problem began."""
    message: str
    action: str = "say"


def write_alarm(folder: Path, record: AlarmRecord) -> None:
    """Append an alarm to `ALARMS_FILE` in a run's folder."""
    with (folder / ALARMS_FILE).open("a", encoding="utf-8") as file:
        print(json.dumps(vars(record), ensure_ascii=False), file=file)
