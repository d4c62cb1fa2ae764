"""Shows a run on wandb: curves over steps, tokens or hours, their best values, histograms, samples and alerts."""

import netrc
import os
import secrets
import shutil
from pathlib import Path
from typing import Any, Literal

from hybrid_grpo.config import LogConfig
from hybrid_grpo.records.files import json_safe
from hybrid_grpo.records.metrics.catalogue import find
from hybrid_grpo.records.trackers.steps import AXES, STEP, TrackedStep, table

WandbMode = Literal["online", "offline", "disabled"]


def resolve_wandb_mode(mode: Literal["auto"] | WandbMode) -> WandbMode:
    """Replace `auto` by the mode in WANDB_MODE or, if unset, by online if an account is configured, else offline."""
    if mode != "auto":
        return mode
    known: WandbMode
    for known in ("online", "offline", "disabled"):
        if os.environ.get("WANDB_MODE") == known:
            return known
    return "online" if os.environ.get("WANDB_API_KEY") or _logged_in() else "offline"


def wandb_host() -> str:
    return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].strip("/")


def _logged_in() -> bool:
    """Return whether `wandb login` has stored a key in the netrc file."""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(wandb_host()) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def run_id(folder: Path, resumes: bool) -> str:
    """Return the run's id on wandb; a file in `folder` keeps it, so that a resumed run continues under this id."""
    file = folder / "id"
    if not (resumes and file.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4))
    return file.read_text()


class WandbTracker:
    """Shows a run on wandb, or, offline, writes it to the run's folder. Any of its methods may raise any exception."""

    greeting: str
    """One line that says where the run is shown."""

    def __init__(self, folder: Path, config: LogConfig, settings: dict[str, Any], resumes: bool) -> None:
        import wandb

        self._wandb, self._defined = wandb, set(AXES)
        mode = resolve_wandb_mode(config.wandb)
        # wandb creates a folder for each table, by default in the user's home, and leaves it there empty.
        self._staging = folder / "wandb" / "staging"
        os.environ["WANDB_DATA_DIR"] = str(self._staging)
        self._run = wandb.init(
            project=config.wandb_project,
            entity=config.wandb_entity,
            name=folder.name,
            group=config.group,
            tags=config.tags or None,
            id=run_id(folder / "wandb", resumes),
            resume="allow",
            config=json_safe(settings),
            mode=mode,
            dir=str(folder),
            # CPU time and memory are those of rank 0, which started this process.
            settings=wandb.Settings(
                init_timeout=60, console="off", silent=True, program="hybrid_grpo", x_stats_pid=os.getppid()
            ),
        )
        for axis in AXES:
            self._run.define_metric(axis, hidden=True)
        offline = f"offline, upload with: wandb sync {folder}/wandb/latest-run"
        self.greeting = f"wandb: {self._run.url if mode == 'online' else offline}"

    def write(self, step: TrackedStep) -> None:
        """Log a step as one row; its curves can be drawn over each of AXES."""
        for name in step.values.keys() | step.distributions.keys():
            self._define(name)
        for message in step.alarms:
            self._run.alert(f"Alarm at step {step.step}", message, level="WARN", wait_duration=0.001)
        # wandb drops rows below its own step count, and a run that was rolled back starts below it.
        self._run.log(self._row(step), step=max(step.step, self._run.step), commit=True)

    def _row(self, step: TrackedStep) -> dict[str, Any]:
        row: dict[str, Any] = dict(step.values)
        row |= {name: self._wandb.Histogram(values) for name, values in step.distributions.items()}
        if step.samples:
            columns, cells = table(step.samples)
            row["samples"] = self._wandb.Table(columns=columns, data=cells)
        if step.pictures:
            row["pictures"] = [self._wandb.Image(str(path), caption=caption) for path, caption in step.pictures]
        return row

    def _define(self, name: str) -> None:
        if name in self._defined:
            return
        self._defined.add(name)
        metric = find(name)
        best = {"higher": "max,last", "lower": "min,last"}.get(metric.better) if metric else None
        self._run.define_metric(name, step_metric=STEP, summary=best)

    def close(self, files: list[Path], failed: bool) -> None:
        if files:
            artifact = self._wandb.Artifact(f"run-{self._run.id}", type="run")
            for file in files:
                artifact.add_file(str(file))
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=int(failed))
        self._wandb.teardown()
        shutil.rmtree(self._staging, ignore_errors=True)
