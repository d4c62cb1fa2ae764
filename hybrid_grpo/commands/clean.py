"""`clean`: removes the checkpoints of finished runs: three times the model or more, which only resuming needs."""

import shutil
from pathlib import Path

from hybrid_grpo.config.errors import UserError, refuse

_HELP = """usage: hybrid-grpo clean RUN [RUN ...]

Remove the checkpoints of finished runs, with the states of their optimizers. The trained models, metrics and rollouts
stay. A cleaned run cannot be resumed for more steps."""


def run(arguments: list[str]) -> None:
    """Remove the checkpoints of the runs whose folders are the arguments, and print how much room that makes."""
    if not arguments or arguments[0].startswith("-"):
        print(_HELP)
    else:
        for name in arguments:
            print(f"{name}: removed {clean(Path(name)) / 1e9:.3g} GB of checkpoints", flush=True)


def clean(folder: Path) -> int:
    """Remove the checkpoints of a finished run; return the size of their files. Raises UserError."""
    from hybrid_grpo.records.exports import is_finished
    from hybrid_grpo.records.lock import FolderLock

    refuse(not (folder / "config.yaml").is_file(), f"{folder} is not the folder of a run: it has no config.yaml")
    lock = FolderLock(folder)
    try:
        checkpoints = sorted((folder / "checkpoints").glob("step_*"))
        if checkpoints and not is_finished(folder):
            raise UserError(f"{folder}: {checkpoints[-1].name} is newer than the model: finish the run first")
        size = sum(file.stat().st_size for path in checkpoints for file in path.rglob("*"))
        for path in checkpoints:
            shutil.rmtree(path)
        return size
    finally:
        lock.release()
