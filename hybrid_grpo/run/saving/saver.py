"""Saves checkpoints when they are due, handles failures to do so, and restores a stage from a checkpoint."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hybrid_grpo.config.errors import RunStopped, refuse
from hybrid_grpo.config.run import CheckpointConfig
from hybrid_grpo.distributed.ranks import all_reduce, rank
from hybrid_grpo.generation import Journal
from hybrid_grpo.records.files import sync
from hybrid_grpo.records.write_failures import WriteFailed, write_together
from hybrid_grpo.run.folder import say
from hybrid_grpo.run.saving.checkpoints import Checkpoint, Checkpoints
from hybrid_grpo.run.stage import Stage


class Saver:
    """Writes the checkpoints of a run of `steps` steps, as `config` asks; `step` is that of the newest one, or None."""

    def __init__(
        self, config: CheckpointConfig, steps: int, folder: Path, settings: dict[str, Any], journal: Journal
    ) -> None:
        self.checkpoints = Checkpoints(folder / "checkpoints", config.keep, settings)
        self.step: int | None = None
        self._config, self._steps, self._folder, self._journal = config, steps, folder, journal
        self._saved_at = time.monotonic()
        self._under_way: int | None = None
        """Step of the checkpoint that is being written beside the run."""
        self._is_short = False
        """Whether memory was once too short for a copy."""

    def continue_from(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint of this run for the newest one."""
        self.step = checkpoint.manifest.step
        self.checkpoints.continue_from(checkpoint)

    def is_due(self, step: int, stage: Stage) -> bool:
        """Return whether to save after a step, because of its number or the time on rank 0's clock. Collective."""
        every, limit = self._config.every, self._config.every_minutes
        if not self._config.is_on or step == self._steps or (every and step % every == 0):
            return self._config.is_on
        late = rank() == 0 and limit > 0 and time.monotonic() - self._saved_at >= 60 * limit
        return bool(all_reduce(torch.tensor(float(late), device=stage.policy.engine.device), "max"))

    def save(self, stage: Stage, step: int, states: dict[str, Any], *, beside: bool = False) -> None:
        """Write the checkpoint of a step; `states` holds the states of everything but the policy. With `beside`, the
        run may continue while it is written (see `finish`), unless `checkpoint.asynchronous` is off or memory is short.
        If writing fails, raise RunStopped if `checkpoint.on_failure` is stop, or if the step is 0: without a first
        checkpoint, a run has nothing to resume from. Collective."""
        self.finish(stage)
        start = time.monotonic()
        with self._reported(step):
            # A checkpoint is useless without the numbers before it.
            write_together(self._sync_numbers, self._folder)
            states = {"policy": stage.policy.state_dict(), **states}
            if beside and self._config.asynchronous and self._begin(stage, step, states):
                self._under_way = step
            else:
                self.checkpoints.save(stage.policy.engine, step, states, stage.shards)
                self._saved(stage, step, time.monotonic() - start)
        self._saved_at = time.monotonic()

    def look(self, stage: Stage) -> None:
        """Finish the checkpoint that is being written if this takes no time any more. Collective."""
        if self._under_way is not None and self.checkpoints.is_ready(stage.policy.engine.device):
            self.finish(stage)

    def finish(self, stage: Stage) -> None:
        """Wait for the checkpoint that is being written, if any. On failure, do what `save` does. Collective."""
        step, self._under_way = self._under_way, None
        if step is not None:
            with self._reported(step):
                self._saved(stage, step, self.checkpoints.finish())

    def _begin(self, stage: Stage, step: int, states: dict[str, Any]) -> bool:
        if self.checkpoints.begin(stage.policy.engine, step, states, stage.shards, copy=True):
            return True
        if not self._is_short:
            say("checkpoint.asynchronous: the host lacks memory for a copy, so training waits for checkpoints")
        self._is_short = True
        return False

    def _saved(self, stage: Stage, step: int, seconds: float) -> None:
        self.step = step
        if rank() == 0:
            self._journal.forget(step)
        if step:  # before the first step, there are no moments yet
            stage.progress.expect_saving(2 * seconds)

    @contextmanager
    def _reported(self, step: int) -> Iterator[None]:
        try:
            yield
        except WriteFailed as failure:
            newest = "there is none before it" if self.step is None else f"the newest one is from step {self.step}"
            if self._config.on_failure == "stop" or step == 0:
                raise RunStopped(
                    f"{failure}; {newest}: make room or fix the cause, and continue with --run.resume auto"
                ) from None
            say(f"WARNING: {failure}; {newest}, and the run continues (checkpoint.on_failure say)")

    def _sync_numbers(self) -> None:
        paths = (self._folder / "metrics.jsonl", self._folder / "rollouts", self._folder)
        for path in paths if rank() == 0 else ():
            if path.exists():
                sync(path)


def load_stage(stage: Stage, checkpoints: Checkpoints, checkpoint: Checkpoint) -> dict[str, Any]:
    """Restore a stage from a checkpoint, including the learning-rate factor if the run went back to it, and return this
    rank's whole state. Raise UserError if the checkpoint lacks a part. Collective."""
    state = checkpoints.load(stage.policy.engine, checkpoint)
    lr_scale = checkpoint.manifest.lr_scale
    stage.policy.load_state_dict(state["policy"] | ({} if lr_scale is None else {"lr_scale": lr_scale}))
    for name, part in stage.all_parts.items():
        # Settings that were added with run.allow_changes may need parts that the checkpoint lacks.
        refuse(name not in state, f"run.resume: {checkpoint.folder} was made without {name}: remove its settings")
        part.load_state_dict(state[name])
    if stage.shards is not None:
        stage.shards.load(checkpoint.folder)
    return state
