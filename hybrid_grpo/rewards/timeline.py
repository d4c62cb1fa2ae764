"""What reward functions learn about the run that calls them: TRL's `trainer_state`."""

import math
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timeline:
    """The length of a run, as functions learn it."""

    steps: int = 1
    epoch_steps: float = 1.0
    """Steps in which every prompt is drawn once."""

    def state(self, done: int) -> dict[str, Any]:
        """Return the fields of TRL's `trainer_state` when this number of steps is completed."""
        return {
            "global_step": done,
            "max_steps": self.steps,
            "epoch": done / self.epoch_steps,
            "num_train_epochs": math.ceil(self.steps / self.epoch_steps),
            "is_world_process_zero": os.environ.get("RANK", "0") == "0",
            "is_local_process_zero": os.environ.get("LOCAL_RANK", "0") == "0",
        }
