"""`python full_disk.py FAULTS ARGUMENTS...`: hybrid_grpo with a disk that is full at chosen points of its checkpoints.

FAULTS is JSON: by the step of a checkpoint, the name of the file that does not fit, which is written to /dev/full, or a
number of bytes that no file of rank 1 may exceed. The latter holds for the whole process, so training waits for that
checkpoint. Under `model`, the file of the exported model that does not fit.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

from hybrid_grpo.__main__ import entry
from hybrid_grpo.distributed.ranks import barrier, rank
from hybrid_grpo.engine import Engine
from hybrid_grpo.policy import Policy
from hybrid_grpo.run.saving.saver import Saver
from hybrid_grpo.run.saving.writing import Writing

FAULTS: dict[str, str | int] = json.loads(sys.argv.pop(1))


def save(engine: Engine, folder: Path, tag: str, state: dict[str, Any]) -> None:
    fault = FAULTS.get(str(int(tag.rpartition("_")[2])))
    if isinstance(fault, str) and rank() == 0:
        (folder / tag / fault).symlink_to("/dev/full")
    # No rank writes before the fault is there.
    barrier()
    whole(engine, folder, tag, state)


def save_run(saver: Saver, stage: Any, step: int, states: Any, *, beside: bool = False) -> None:
    saved(saver, stage, step, states, beside=beside and not isinstance(FAULTS.get(str(step)), int))


def write(writing: Writing) -> None:
    fault, unlimited = FAULTS.get(str(writing.step)), resource.RLIM_INFINITY
    if isinstance(fault, int) and rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault, unlimited))
    try:
        written(writing)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))


def export(policy: Policy, folder: Path) -> None:
    if rank() == 0 and "model" in FAULTS:
        folder.mkdir()
        (folder / str(FAULTS["model"])).symlink_to("/dev/full")
    exported(policy, folder)


saved, Saver.save = Saver.save, save_run  # type: ignore[method-assign]
written, Writing._write = Writing._write, write  # type: ignore[method-assign]
whole, Engine.save = Engine.save, save  # type: ignore[method-assign]
exported, Policy.export = Policy.export, export  # type: ignore[method-assign]

if __name__ == "__main__":
    entry()
