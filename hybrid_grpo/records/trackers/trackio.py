"""A run in trackio, the local dashboard of Hugging Face: `trackio show --project PROJECT`."""

from pathlib import Path
from typing import Any

from hybrid_grpo.config import LogConfig
from hybrid_grpo.records.files import json_safe
from hybrid_grpo.records.trackers.steps import TrackedStep, table


class TrackioTracker:
    """A run in trackio's database, or on the Space that TRACKIO_SPACE_ID names."""

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

    def write(self, entry: TrackedStep) -> None:
        """Log a step: its numbers, histograms and samples, and an alert for each alarm."""
        for message in entry.alarms:
            self._trackio.alert(f"Alarm at step {entry.step}", message)
        row: dict[str, Any] = dict(entry.values)
        row |= {name: self._trackio.Histogram(values) for name, values in entry.distributions.items()}
        if entry.samples:
            columns, cells = table(entry.samples)
            row["samples"] = self._trackio.Table(columns=columns, data=cells)
        self._trackio.log(row, step=entry.step)

    def close(self, files: list[Path], failed: bool) -> None:
        """Finish; the report stays in the run's folder."""
        self._trackio.finish()
