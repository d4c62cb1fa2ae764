"""Records the alarms that went off in a file in the run's folder. This module does not import torch."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ALARMS_FILE = "alarms.jsonl"
"""Name of the file, which has one JSON object with the fields of `AlarmRecord` per alarm that went off, and another one
without a message when its problem is over."""


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
    until: int | None = None
    """The last step with the problem; None while the problem lasts."""


def write_alarm(folder: Path, record: AlarmRecord) -> None:
    """Append an alarm to `ALARMS_FILE` in a run's folder."""
    with (folder / ALARMS_FILE).open("a", encoding="utf-8") as file:
        print(json.dumps(vars(record), ensure_ascii=False), file=file)


def joined(lines: Iterable[Mapping[str, Any]]) -> list[AlarmRecord]:
    """Return the alarms in lines of `ALARMS_FILE`, each with the end of its problem."""
    found: list[AlarmRecord] = []
    lasting: dict[str, int] = {}
    for line in (line for line in lines if "until" in line):
        name, since, message, until = (line[key] for key in ("alarm", "since", "message", "until"))
        if (at := lasting.pop(name, None)) is not None:
            found[at] = replace(found[at], until=line["step"] - 1)
        if message:
            if until is None:
                lasting[name] = len(found)
            found.append(AlarmRecord(line["step"], name, since, message, until=until))
    return found
