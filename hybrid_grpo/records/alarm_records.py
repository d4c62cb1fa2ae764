"""The file of a run's folder that records the alarms that went off. Needs no torch."""

import json
from dataclasses import dataclass
from pathlib import Path

ALARMS_FILE = "alarms.jsonl"
"""One JSON object per alarm that went off: the fields of `AlarmRecord`."""


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
    """Append an alarm to the file in a run's folder."""
    with (folder / ALARMS_FILE).open("a", encoding="utf-8") as file:
        print(json.dumps(vars(record), ensure_ascii=False), file=file)
