"""The program of test_stream_runs.py: `python programs.py COMMANDS`, in a workshop's folder, gives the commands
of a JSON file to one process, one after the other, and ends with the status of the last; all others are to be 0."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hybrid_grpo import __main__ as program
from hybrid_grpo.features.streaming import prompt_stream
from hybrid_grpo.model.ranks import rank


def main(commands: list[list[str]]) -> int:
    opened = []

    class Counted(prompt_stream.RowStream):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            opened.append(self)

    prompt_stream.RowStream = Counted  # type: ignore[misc]
    status = 0
    for command in commands:
        assert not status
        status = program.main(command)
    assert len(opened) == (len(commands) if rank() == 0 else 0), "the first rank alone reads"
    return status


if __name__ == "__main__":
    status = main(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    sys.stderr.flush()
    # As the command line does: the interpreter's shutdown is not safe after DeepSpeed.
    os._exit(status)
