"""Shows a run in MLflow, at MLFLOW_TRACKING_URI or MLflow's own default."""

import math
import re
from pathlib import Path
from typing import Any

from hybrid_grpo.config import LogConfig
from hybrid_grpo.records.files import flattened
from hybrid_grpo.records.trackers.steps import TrackedStep, table

_LONGEST_PARAMETER = 6000
"""Maximum number of characters that MLflow accepts in a parameter."""


class MlflowTracker:
    """Shows a run in the experiment that log.wandb_project names, without histograms, which MLflow does not have."""

    def __init__(self, folder: Path, config: LogConfig, settings: dict[str, Any], resumes: bool) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(config.wandb_project)
        id_file = folder / "mlflow_run_id"
        known = id_file.read_text() if resumes and id_file.exists() else None
        run = mlflow.start_run(run_id=known, run_name=None if known else folder.name, description=config.notes)
        if known is None:
            id_file.write_text(run.info.run_id)
            # MLflow refuses other characters in names.
            parameters = [
                (re.sub(r"[^\w.\- /]", "_", name), str(value)[:_LONGEST_PARAMETER])
                for name, value in flattened(settings)
            ]
            for start in range(0, len(parameters), 100):
                mlflow.log_params(dict(parameters[start : start + 100]))
            kinds = {"group": config.group, "job_type": config.job_type}
            tags = {**{name: kind for name, kind in kinds.items() if kind}, **dict.fromkeys(config.tags, "true")}
            mlflow.set_tags(tags)
        self.greeting = f"mlflow: {mlflow.get_tracking_uri()}, experiment {config.wandb_project}"

    def write(self, step: TrackedStep) -> None:
        """Log a step's metrics and alarms, and its samples as a table if histograms are due or an alarm went off."""
        # MLflow's names have no @, and its server refuses NaN and infinity.
        numbers = {name.replace("@", "_at_"): value for name, value in step.values.items() if math.isfinite(value)}
        self._mlflow.log_metrics(numbers, step=step.step)
        if step.samples and (step.distributions or step.alarms):  # each table is a file
            columns, cells = table(step.samples)
            data = {column: [row[place] for row in cells] for place, column in enumerate(columns)}
            self._mlflow.log_dict(data, f"samples/step_{step.step:06d}.json")
        for path, _ in step.pictures:
            self._mlflow.log_artifact(str(path), f"pictures/step_{step.step:06d}")
        for number, message in enumerate(step.alarms):
            self._mlflow.set_tag(f"alarm_step_{step.step}_{number}", message)

    def close(self, files: list[Path], failed: bool) -> None:
        """Upload files of the run as artifacts, and end the MLflow run."""
        for file in files:
            self._mlflow.log_artifact(str(file))
        self._mlflow.end_run("FAILED" if failed else "FINISHED")
