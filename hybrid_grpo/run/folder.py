"""The folder of a run: locks it, and writes config.yaml with facts at its head."""

import dataclasses
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from hybrid_grpo.config import ModelRunConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.kept_code import keep_code
from hybrid_grpo.config.recipes import load_yaml
from hybrid_grpo.config.run import NAMED_BY_TIME, unused_name
from hybrid_grpo.config.secrets import masked_text
from hybrid_grpo.distributed.ranks import from_first_rank, rank, world_size
from hybrid_grpo.records.console_log import ConsoleLog
from hybrid_grpo.records.exports import exported, is_finished
from hybrid_grpo.records.files import replace_text, set_aside
from hybrid_grpo.records.lock import FolderLock
from hybrid_grpo.records.write_failures import one_line

_PACKAGES = ("hybrid-grpo", "torch", "deepspeed", "transformers", "datasets")


def say(message: str) -> None:
    """Print on rank 0. The run continues even if its output can no longer be written."""
    if rank() == 0:
        with suppress(OSError):
            print(message, flush=True)


def named(config: ModelRunConfig) -> ModelRunConfig:
    """Return the configuration with a name of the run; without one, rank 0 makes it by `unnamed`. Collective."""
    run, name = config.run, config.run.name
    if not name and rank() == 0:
        name = unnamed(Path(run.dir), config.command, run.resume)
    return dataclasses.replace(config, run=dataclasses.replace(run, name=from_first_rank(name)))


def unnamed(folder: Path, command: str, resume: str) -> str:
    """Return the name in `folder` of a run of `command` that was given none: the command and the time or, if `resume`
    is "auto", the newest such run that is not finished, which is printed."""
    earlier = sorted(folder.glob(NAMED_BY_TIME.format(command)), reverse=True)
    if resume == "auto" and earlier:
        if (run := next((run for run in earlier if not is_finished(run)), None)) is not None:
            say(f"run.resume auto: {run} is the newest unfinished run of {command} without a name")
            return run.name
        say(f"run.resume auto: a new run, as {earlier[0]} is finished: --run.name {earlier[0].name} continues it")
    return unused_name(folder, command)


class RunFolder:
    """The folder `path`, which is created if absent and belongs to this run until `release`. Raises UserError on all
    ranks if another run holds it. Collective."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: FolderLock | None = None
        self._console: ConsoleLog | None = None
        self._is_new, refusal = not path.exists(), ""
        if rank() == 0:
            try:
                with one_line(path):
                    path.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._lock = FolderLock(path)
                self._console = ConsoleLog(path)
            except UserError as error:
                refusal = str(error)
        if refusal := from_first_rank(refusal):
            raise UserError(refusal)

    def release(self) -> None:
        """Let another run have the folder. What is printed from here on is not kept in it."""
        if self._console is not None:
            self._console.close()
        if self._lock is not None:
            self._lock.release()

    def discard(self) -> None:
        """Release the folder, and remove it if it was created for this run."""
        self.release()
        if self._lock is not None and self._is_new:
            shutil.rmtree(self.path)

    def begin(self, config_yaml: str, facts: Mapping[str, str], lines: Iterable[str], *, is_damaged: bool) -> None:
        """On rank 0, write config.yaml with `facts` at its head, and `lines` to metrics.jsonl; if that `is_damaged`, it
        is kept under another name."""
        if rank() != 0:
            return
        with one_line(self.path):
            if is_damaged and (metrics := self.path / "metrics.jsonl").is_file():
                say(f"WARNING: {metrics}: it is damaged; it is kept as {set_aside(metrics).name}")
            versions = [f"python {platform.python_version()}", *(f"{p} {_version(p)}" for p in _PACKAGES)]
            own = {
                "started": datetime.now(UTC).isoformat(timespec="seconds"), "versions": ", ".join(versions),
                "git commit": _git_commit(),
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {os.cpu_count()} cores",
                "ranks": str(world_size()),
            }  # fmt: skip
            head = "".join(f"# {name}: {masked_text(fact)}\n" for name, fact in {**own, **facts}.items())
            replace_text(self.path / "config.yaml", head + config_yaml)
            keep_code(load_yaml(config_yaml), self.path)
            replace_text(self.path / "metrics.jsonl", "".join(lines))

    def abandon_models(self, last: int) -> None:
        """On rank 0, set aside the models of steps after `last`, to which the run goes back."""
        for model in sorted(self.path.glob("model*")) if rank() == 0 else ():
            if (step := exported(model).get("step", 0)) > last:
                with one_line(self.path):
                    kept = set_aside(model, "abandoned")
                say(f"{model}, of the abandoned step {step}, is kept as {kept.name}: remove it if it is not needed")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # its sources are on the path
        return "not installed"


def _git_commit() -> str:
    """Return the git commit of the package; "none" outside a git checkout."""
    here = Path(__file__).parent
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        commit, changes = (
            subprocess.run(c, cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
            for c in commands
        )
    except (OSError, subprocess.SubprocessError):
        return "none"
    return f"{commit} with uncommitted changes" if changes else commit
