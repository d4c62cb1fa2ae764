"""The life of a run around its steps: its folder, resuming, checkpoints, and what it leaves behind."""

import copy
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from hybrid_grpo.config import ModelRunConfig, TrainConfig, to_dict
from hybrid_grpo.config.errors import RunInterrupted, RunStopped, UserError
from hybrid_grpo.config.parsing import Parsed
from hybrid_grpo.config.secrets import masked_text
from hybrid_grpo.generation import Journal
from hybrid_grpo.model.ranks import all_gather_objects, all_reduce, barrier, from_first_rank, rank, world_size
from hybrid_grpo.policy import Policy
from hybrid_grpo.records.alarm_records import write_alarm
from hybrid_grpo.records.alarms.alarms import Alarms, RollBack
from hybrid_grpo.records.exports import export, exported
from hybrid_grpo.records.files import replace_text, sync
from hybrid_grpo.records.lock import FolderLock
from hybrid_grpo.records.profiler import Profiler
from hybrid_grpo.records.sinks import Log
from hybrid_grpo.records.step_trace import StepTrace
from hybrid_grpo.records.write_failures import WriteFailed, one_line, why, write_prompts, write_together
from hybrid_grpo.run import fingerprints
from hybrid_grpo.run.collection import loaded_objects_kept
from hybrid_grpo.run.damage import set_aside_damaged
from hybrid_grpo.run.fingerprints import CODE, Fingerprints
from hybrid_grpo.run.origin import origin
from hybrid_grpo.run.resuming import find_start, identity, lines_before, load_stage, settings_of
from hybrid_grpo.run.saving.best import Best
from hybrid_grpo.run.saving.checkpoint import Checkpoint, Checkpoints
from hybrid_grpo.run.saving.space import check_space
from hybrid_grpo.run.stage import Stage
from hybrid_grpo.run.stopping.stopping import Progress

_SAVING_S_PER_GB = 10.0
"""Of what a rank writes, on slow storage that ranks share."""


class Run:
    """One run and its folder; raises UserError where the folder holds a run that is not to be resumed.

    `facts` are lines for the head of config.yaml: the batch equation, what the data held. `inputs` are the fingerprints
    of what the run reads, which go into its checkpoints.
    """

    def __init__(
        self, parsed: Parsed[ModelRunConfig], facts: dict[str, str], inputs: Fingerprints = fingerprints.none
    ) -> None:
        self.config = parsed.config
        run = parsed.config.run
        self.folder = Path(run.dir) / run.name
        self._alarms = Alarms.of(self.config)
        self._back_to = -1
        """Step of the checkpoint that the run went back to, while there is no newer one."""
        self._lock = self._take()
        settings = settings_of(parsed.config)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", parsed.config.checkpoint.keep, settings)
        self._inputs = inputs
        self._look_at_inputs()
        self.journal = Journal(self.folder / "journal", rank())
        try:
            self.start = find_start(parsed.config, self.folder, self.checkpoints, self.say)
        except UserError:
            self._leave()
            raise
        evaluation = self.config.eval if isinstance(self.config, TrainConfig) else None
        self._best = Best(evaluation, self.folder, self.start.lines)
        self._saved: int | None = None
        """Step of the newest checkpoint."""
        self._saved_at = time.monotonic()
        # Every rank has looked into the folder before rank 0 changes it.
        barrier()
        if rank() == 0 and not self.finished:
            with one_line(self.folder):
                code = {name: of for name, of in self.checkpoints.inputs.items() if name.startswith(CODE)}
                known = {**origin(), **facts, **code}
                head = "".join(f"# {name}: {masked_text(fact)}\n" for name, fact in known.items())
                for damage in set_aside_damaged(self.folder, numbers=self.start.damaged):
                    self.say(damage)
                replace_text(self.folder / "config.yaml", head + parsed.yaml)
                replace_text(self.folder / "metrics.jsonl", "".join(self.start.lines))
        if self.start.checkpoint is not None and not self.start.forks:
            self._saved = self.start.step
            if run.resume != "auto":
                # Asked for by name: what came after it is given up.
                self.checkpoints.forget_after(self.start.step)
            self.checkpoints.rollbacks = self.start.checkpoint.manifest.rollbacks
        for name, fact in facts.items():
            self.say(f"{name}: {fact}")
        if self.finished:
            setting = "run.steps" if self.start.step == run.steps else "eval.patience"
            self.say(f"{self.folder} is finished after {self.start.step} steps: raise {setting} to go on")

    @property
    def finished(self) -> bool:
        """Whether the run has made all its steps already, or lost its patience, and its model is written."""
        step, ended = self.start.step, self.start.step == self.config.run.steps or self._best.exhausted
        return self.start.checkpoint is not None and exported(self.folder / "model").get("step") == step and ended

    def _take(self) -> FolderLock | None:
        """Rank 0 makes the folder and locks it, before anything in it changes; raises UserError on all ranks."""
        lock, refused, self._is_new = None, None, not self.folder.exists()
        if rank() == 0:
            try:
                with one_line(self.folder):
                    self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = FolderLock(self.folder)
            except UserError as error:
                refused = str(error)
        refused = all_gather_objects(refused)[0]
        if refused:
            raise UserError(refused)
        return lock

    def _leave(self) -> None:
        """Give up the lock, and a folder that was made for it."""
        if self._lock is not None:
            self._lock.release()
            if self._is_new:
                shutil.rmtree(self.folder)

    def say(self, message: str) -> None:
        """Print on rank 0. A run goes on where nobody reads it any more."""
        if rank() == 0:
            with suppress(OSError):
                print(message, flush=True)

    def train(self, stage: Stage, write_report: Callable[[Path], object]) -> None:
        """Take a stage from the start or the newest checkpoint to the last step; then export the model.

        Raises RunStopped where a step could not be finished; the run is saved as it was before that step. Raises
        RunInterrupted where the run was asked to stop; it is saved. `write_report` is given the folder at the end.
        """
        stage.progress = Progress(self.config.run, stage.policy.engine.device)
        stage.trace = StepTrace(self.config.log, self.config.run.steps)
        try:
            self._train(stage, write_report)
        except RunInterrupted:
            # A launcher kills the other ranks once one has ended, and rank 0 is the last to close its outputs.
            barrier()
            raise
        finally:
            if self._lock is not None:
                self._lock.release()

    def _train(self, stage: Stage, write_report: Callable[[Path], object]) -> None:
        if rank() == 0:
            with one_line(self.folder):
                replace_text(self.folder / "deepspeed.json", json.dumps(stage.policy.deepspeed_config, indent=2) + "\n")
        if stage.policy.adapters is not None:
            self.say(f"lora: {stage.policy.adapters}")
        size = check_space(
            self.folder, self.config.checkpoint, stage.policy, stage.shards, self._best.models, stage.others
        )
        stage.progress.expect_saving(_SAVING_S_PER_GB * size / 1e9 / world_size())
        done = self.restore(stage)
        # Models of the hub are whole only now.
        self._look_at_inputs()
        self._bind_journal()
        settings = {**to_dict(self.config), "deepspeed": stage.policy.deepspeed_config}
        if isinstance(stage.policy, Policy):
            stage.policy.journal = self.journal
        with loaded_objects_kept():
            while True:
                try:
                    self._advance(stage, done, settings, write_report)
                    break
                except RollBack as diverged:
                    done = self._roll_back(stage, diverged)
        if rank() == 0:
            self.journal.clear()

    def _advance(
        self, stage: Stage, done: int, settings: dict[str, Any], write_report: Callable[[Path], object]
    ) -> None:
        """Make the steps after `done`, and export the model."""
        profiler = Profiler(self.config.log.profiled, self.folder / "profile")
        told = self.config.log, self.folder, self.config.run.steps, done or -1, settings, stage.policy.tokenizer
        with Log(*told) as log, self._reported(write_report):
            if self._saves and self._saved is None:
                stage.progress.enter("saving", done)
                with stage.meter.time("time/checkpoint_s"):
                    self._save(stage, done, self._states(stage))
            if stage.eval_sets and done == 0:
                stage.progress.enter("evaluation", 0)
                stage.evaluate(0, stage.eval_sets)
                log.write(0, values := self.watched(0, stage.meter.reduce()))
                self._keep_best(stage, 0, values)
            k = done
            stage.alarms = self._alarms
            for k in () if self._best.exhausted else range(done + 1, self.config.run.steps + 1):
                before = copy.deepcopy(self._states(stage))
                stage.trace.begin(k)
                try:
                    with profiler.step(k, stage.meter):
                        stage.step(k)
                except RunInterrupted:
                    if self._saved != k - 1:
                        stage.progress.enter("saving")
                        self._save(stage, k - 1, before)
                    raise self._interrupted(stage) from None
                except RunStopped as stop:
                    if stage.last_rollout is not None:
                        log.write_rollouts(k, *stage.last_rollout, always=True)
                    if self._saved != k - 1:
                        self._save(stage, k - 1, before)
                    if self._saved is None:
                        raise
                    raise RunStopped(f"{stop}; the run is saved as it was after step {self._saved}") from stop
                if stage.last_rollout is not None:
                    log.write_rollouts(k, *stage.last_rollout, stage.last_advantages_BT)
                saves = self._saves_after(k, stage)
                if saves or k == self.config.run.steps:
                    write_prompts(self.folder, stage.tried_prompts())
                due = [held_out for held_out in stage.eval_sets if self._is_due(k, held_out.every)]
                if due:
                    stage.progress.enter("evaluation")
                    stage.evaluate(k, due)
                log.write_trace(k, stage.trace.own(stage.meter.spans, stage.last_rollout))
                # Numbers before the checkpoint: a checkpoint without them would resume after a gap, while lines
                # without a checkpoint are cut again.
                log.write(k, values := self.watched(k, stage.meter.reduce()))
                self._act(stage, k)
                self._keep_best(stage, k, values)
                ends = k < self.config.run.steps and self._best.exhausted
                # After the last step the model is exported, which would be wanted of a resumed run too.
                stops = k < self.config.run.steps and not ends and stage.progress.stops()
                saves = saves and (k == self.config.run.steps or not self._alarms.doubts)
                if (saves or stops or (ends and self._saves)) and not self._alarms.diverged:
                    stage.progress.enter("saving")
                    with stage.meter.time("time/checkpoint_s"):
                        self._save(stage, k, self._states(stage))
                if stops:
                    raise self._interrupted(stage)
                if ends:
                    write_prompts(self.folder, stage.tried_prompts())
                    self.say(f"stopped after step {k}: eval.patience evaluations without a better {self._best}")
                    break
            stage.progress.enter("export")
            self._export(stage, k)
            stage.policy.engine.print_communication()

    @contextmanager
    def _reported(self, write_report: Callable[[Path], object]) -> Iterator[None]:
        """Write report.html after the block, also where the run is stopped. A run does not fail by it."""
        try:
            yield
        except RunStopped:
            self._write_report(write_report)
            raise
        self._write_report(write_report)

    def _write_report(self, write_report: Callable[[Path], object]) -> None:
        numbers = self.folder / "metrics.jsonl"
        # A run that could not write its first checkpoint has nothing to report, and has said why it ends.
        if rank() == 0 and numbers.exists() and numbers.stat().st_size:
            try:
                write_report(self.folder)
            except Exception as error:  # whatever it is, the run is whole without its report
                again = f"hybrid-grpo report {self.folder} writes it again"
                self.say(f"WARNING: report.html could not be written: {why(error, self.folder)}: {again}")

    def _act(self, stage: Stage, step: int) -> None:
        """Do what the alarms of a step ask for. Raises RunStopped or RollBack."""
        try:
            if self._alarms.stops and self._saves and not self._alarms.diverged:
                self._save(stage, step, self._states(stage))
            self._alarms.act(f"the newest checkpoint is of step {self._saved}")
        except (RunStopped, RollBack):
            # What a policy that has diverged sampled is not to be learned from when the step is made again.
            if rank() == 0:
                self.journal.clear()
            raise

    def _roll_back(self, stage: Stage, diverged: RollBack) -> int:
        """Go back to the newest checkpoint before the run diverged, and lower the learning rate; return its step."""
        config, before = self.config.guard, diverged.since
        if self._saved == self._back_to and before == self._back_to + 1:
            # Bad weights show in the step after them: the one that it went back to had led there already.
            before = min(before, self._saved)
        checkpoint, _ = self.checkpoints.newest_whole(before)
        if checkpoint is None or self.checkpoints.rollbacks >= config.max_rollbacks:
            why = "there is no checkpoint to go back to" if checkpoint is None else "guard.max_rollbacks is reached"
            raise RunStopped(f"{diverged}: {why}: no model was exported: lower policy.lr or policy.max_grad_norm")
        lr_scale, step = config.lr_factor * stage.policy.lr_scale, checkpoint.manifest.step
        note = f"{diverged}: back to step {step}, the learning rate times {lr_scale:g}"
        checkpoint = self.checkpoints.roll_back(checkpoint, lr_scale, note)
        self._bind_journal()
        self._saved = step
        self._best.remember(lines_before(self.folder / "metrics.jsonl", step))
        self._load(stage, checkpoint)
        self.say(f"ROLLBACK: {note}")
        return step

    def _bind_journal(self) -> None:
        """Completions that other weights have sampled are not to be taken for those of this run."""
        self.journal.bind(identity(self.config, self.checkpoints))

    def _look_at_inputs(self) -> None:
        self.checkpoints.inputs = from_first_rank(self._inputs() if rank() == 0 else {})

    def _interrupted(self, stage: Stage) -> RunInterrupted:
        asked = f"stopped ({stage.progress.why()})"
        if self._saved is None:
            return RunInterrupted(f"{asked}; nothing could be saved")
        return RunInterrupted(f"{asked}, saved after step {self._saved} in {self.folder}: go on with --run.resume auto")

    def _is_due(self, step: int, every: int) -> bool:
        """Whether a step is the last one, or one of every `every` (0: none but the last)."""
        return step == self.config.run.steps or bool(every and step % every == 0)

    @property
    def _saves(self) -> bool:
        """Whether checkpoints are written at all."""
        return bool(self.config.checkpoint.every or self.config.checkpoint.every_minutes)

    def _saves_after(self, step: int, stage: Stage) -> bool:
        """Whether a checkpoint follows a step: by its number, or by the clock of rank 0. Collective."""
        limit = self.config.checkpoint.every_minutes
        if not self._saves or self._is_due(step, self.config.checkpoint.every):
            return self._saves
        late = rank() == 0 and limit > 0 and time.monotonic() - self._saved_at >= 60 * limit
        return bool(all_reduce(torch.tensor(float(late), device=stage.policy.engine.device), "max"))

    def _save(self, stage: Stage, step: int, states: dict[str, Any]) -> None:
        """Write the checkpoint of a step. Raises RunStopped where that fails and `checkpoint.on_failure` is stop, or
        the step is 0: without the first one there is nothing to go on from."""
        start = time.monotonic()
        try:
            # A checkpoint is of no use without the numbers before it.
            write_together(self._sync_numbers, self.folder)
            states = {"policy": stage.policy.state_dict(), **states}
            self.checkpoints.save(stage.policy.engine, step, states, stage.all_shards)
            self._saved = step
            if rank() == 0:
                self.journal.forget(step)
        except WriteFailed as failure:
            before = "there is none before it" if self._saved is None else f"the newest is that of step {self._saved}"
            if self.config.checkpoint.on_failure == "stop" or step == 0:
                raise RunStopped(
                    f"{failure}; {before}: make room or mend it, and go on with --run.resume auto"
                ) from None
            self.say(f"WARNING: {failure}; {before}, and the run goes on (checkpoint.on_failure say)")
        self._saved_at = time.monotonic()
        stage.progress.expect_saving(2 * (self._saved_at - start))

    def _sync_numbers(self) -> None:
        rollouts = self.folder / "rollouts"
        for path in (self.folder / "metrics.jsonl", rollouts, self.folder) if rank() == 0 else ():
            if path.exists():
                sync(path)

    def _keep_best(self, stage: Stage, step: int, values: dict[str, float]) -> None:
        """Keep the weights of a step in `model_best/` where they are the best, and not in doubt."""
        if not self._alarms.diverged and (warning := self._best.take(stage.policy, step, values)):
            self.say(warning)

    def _export(self, stage: Stage, step: int) -> None:
        """Write `model/` and, with a moving average of the weights, `model_ema/` before it, since `model/` tells that a
        run is finished; each whole or not at all. Raises UserError where that fails."""
        average, model = stage.policy.average, self.folder / "model_ema"
        try:
            if average is not None:
                with average.used():
                    export(stage.policy, model, {"step": step})
            model = self.folder / "model"
            export(stage.policy, model, {"step": step})
        except WriteFailed as failure:
            if self._saved != step:
                self._save(stage, step, self._states(stage))
            raise UserError(
                f"{model} could not be written: {failure}; the newest checkpoint, of step"
                f" {self._saved}, has the weights: make room or mend it, and --run.resume auto writes the model again"
            ) from failure

    def watched(self, step: int, values: dict[str, float]) -> dict[str, float]:
        """The numbers of a step with its alarms; those that go off are also said."""
        for alarm in self._alarms.watch(step, values):
            self.say(f"ALARM: {alarm.message}")
            if rank() == 0:
                with one_line(self.folder):
                    write_alarm(self.folder, alarm)
        return values

    def restore(self, stage: Stage) -> int:
        """Bring a stage to the checkpoint that the run starts from, if there is one; return the steps done."""
        if self.start.checkpoint is None:
            return 0
        self._load(stage, self.start.checkpoint)
        self.say(f"resumed {self.folder} after step {self.start.step}")
        return self.start.step

    def _load(self, stage: Stage, checkpoint: Checkpoint) -> None:
        """Bring a stage and the alarms to where they were when a checkpoint was written."""
        manifest, state = checkpoint.manifest, load_stage(stage, self.checkpoints, checkpoint)
        self._alarms = Alarms.of(self.config)
        self._alarms.recall(self.folder, manifest.step)
        if "alarms" in state:
            self._alarms.load_state_dict(state["alarms"])
        self._alarms.note, self._back_to = manifest.note, manifest.step if manifest.note else -1

    def _states(self, stage: Stage) -> dict[str, Any]:
        """What a checkpoint holds beside the policy."""
        return {name: part.state_dict() for name, part in stage.parts.items()} | {"alarms": self._alarms.state_dict()}
