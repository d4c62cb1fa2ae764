"""Shows a run in trackio, the local dashboard of Hugging Face: `trackio show --project PROJECT`."""

from pathlib import Path
from typing import Any

from hybrid_grpo.config import LogConfig
from hybrid_grpo.records.files import json_safe
from hybrid_grpo.records.trackers.steps import TrackedStep, as_row


class TrackioTracker:
    """Writes a run to trackio's database, or to the Space that TRACKIO_SPACE_ID names."""

    def __init__(self, folder: Path, config: LogConfig, settings: dict[str, Any], resumes: bool) -> None:
        import trackio

        self._trackio, project = trackio, config.wandb_project
        notes = {"tags": config.tags, "notes": config.notes, "job_type": config.job_type}
        trackio.init(
            project=project,
            name=folder.name,
            group=config.group,
            config=json_safe({**settings, **{name: note for name, note in notes.items() if note}}),
            resume="allow" if resumes else "never",
            embed=False,
        )
        self.greeting = f"trackio: trackio show --project {project}"

    def write(self, step: TrackedStep) -> None:
        """Log a step as one row, and an alert for each alarm."""
        for message in step.alarms:
            self._trackio.alert(f"Alarm at step {step.step}", message)
        self._trackio.log(as_row(step, self._trackio), step=step.step)

    def close(self, files: list[Path], failed: bool) -> None:
        self._trackio.finish()
