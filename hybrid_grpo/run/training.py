"""Takes a run from its start to its end: resuming, steps, checkpoints, alarms, stopping, and the run's results."""

import gc
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from hybrid_grpo.config import ModelRunConfig, TrainConfig, to_dict
from hybrid_grpo.config.building import dump
from hybrid_grpo.config.errors import RunInterrupted, RunStopped, UserError
from hybrid_grpo.config.parsing import Parsed
from hybrid_grpo.distributed.ranks import all_gather_objects, barrier, rank, world_size
from hybrid_grpo.generation import Journal
from hybrid_grpo.model.doing import Doing
from hybrid_grpo.model.kernels.gpu import fallbacks, slow_ranks
from hybrid_grpo.records.alarm_records import write_alarm
from hybrid_grpo.records.alarms.alarms import Alarms, RollBack
from hybrid_grpo.records.exports import export, exported
from hybrid_grpo.records.files import replace_text
from hybrid_grpo.records.metrics.meter import stages_of
from hybrid_grpo.records.profiler import Profiler
from hybrid_grpo.records.sinks import Log
from hybrid_grpo.records.write_failures import WriteFailed, one_line, why, write_prompts
from hybrid_grpo.run.fingerprints import CODE, Fingerprints
from hybrid_grpo.run.folder import RunFolder, named, say
from hybrid_grpo.run.saving.best import Best
from hybrid_grpo.run.saving.checkpoints import Checkpoint
from hybrid_grpo.run.saving.saver import Saver, load_stage
from hybrid_grpo.run.saving.space import check_space
from hybrid_grpo.run.settings import identity, settings_of
from hybrid_grpo.run.stage import RunServices, Stage
from hybrid_grpo.run.start import find_start, lines_before
from hybrid_grpo.run.stopping.progress import Progress, heartbeat
from hybrid_grpo.run.stopping.status import own_status

_SAVING_S_PER_GB = 10.0
"""Assumed time for a rank to write a GB to slow storage that ranks share."""
WriteReport = Callable[[Path], object]
"""Function that writes report.html to the folder that it is given."""


class TrainingRun:
    """A run and its folder. Raises UserError if the folder holds a run that must not be resumed. `facts` are lines for
    the head of config.yaml, such as the batch equation. `inputs` returns the fingerprints of what the run reads, which
    its checkpoints store. Ranks exchange numbers on `device`. The stage that is trained is made with `services`."""

    def __init__(
        self, parsed: Parsed[ModelRunConfig], facts: dict[str, str], device: torch.device, inputs: Fingerprints = dict
    ) -> None:
        self.config = named(parsed.config)
        run = self.config.run
        self._steps, self._inputs, self._alarms = run.steps, inputs, Alarms.of(self.config)
        self._back_to = -1
        """Step of the checkpoint that the run last rolled back to; -1 if there is none."""
        self._run_folder = RunFolder(Path(run.dir) / str(run.name))
        self.folder = self._run_folder.path
        self.journal = Journal(self.folder / "journal", rank())
        self.services = RunServices(Progress(run, device), self._alarms, self.journal)
        settings = settings_of(self.config)
        self.saver = Saver(parsed.config.checkpoint, run.steps, self.folder, settings, self.journal)
        self.checkpoints = self.saver.checkpoints
        self.checkpoints.fingerprint(inputs)
        try:
            self.start = find_start(self.config, self.folder, self.checkpoints)
        except UserError:
            self._run_folder.discard()
            raise
        evaluation = self.config.eval if isinstance(self.config, TrainConfig) else None
        self._best = Best(evaluation, self.folder, self.start.lines)
        if self.start.rewinds:
            self._best.go_back(self.start.step, self.start.lines)
        code = {name: of for name, of in self.checkpoints.inputs.items() if name.startswith(CODE)}
        self._head = dump(self.config), {**facts, **code}
        if self.start.checkpoint is not None and not self.start.forks:
            self.saver.continue_from(self.start.checkpoint)
        for name, fact in facts.items():
            say(f"{name}: {fact}")
        if self.finished:
            setting = "run.steps" if self.start.step == run.steps else "eval.patience"
            say(f"{self.folder} is finished after {self.start.step} steps: raise {setting} to continue")

    @property
    def finished(self) -> bool:
        """Whether all steps are done or `eval.patience` is exhausted, and the model is written."""
        step, ended = self.start.step, self.start.step == self._steps or self._best.exhausted
        return self.start.checkpoint is not None and exported(self.folder / "model").get("step") == step and ended

    def train(self, stage: Stage, write_report: WriteReport) -> None:
        """Train a stage from its start or a checkpoint to the last step; then export the model and write the report.
        Raise RunStopped if a step could not be finished (the run is saved as it was before that step), and
        RunInterrupted if the run was asked to stop (it is saved)."""
        assert stage.progress is self.services.progress, "the stage has the services of another run"
        stage.progress.start()
        try:
            done = self._prepare(stage)
            with loaded_objects_kept(), heartbeat(own_status().mine):
                while True:
                    try:
                        self._advance(stage, done, write_report)
                        break
                    except RollBack as diverged:
                        done = self._roll_back(stage, diverged)
            if rank() == 0:
                self.journal.clear()
        except RunInterrupted:
            # A launcher kills the other ranks once one has ended, and rank 0 is the last to close its outputs.
            barrier()
            raise
        except Exception:
            self.checkpoints.leave()
            raise
        finally:
            self._run_folder.release()

    def _prepare(self, stage: Stage) -> int:
        """Check the disk space and bring the stage to where the run starts. Return the number of steps done."""
        if stage.policy.adapters is not None:
            say(f"lora: {stage.policy.adapters}")
        size = check_space(self.folder, self.config.checkpoint, stage, self._best.models)
        stage.progress.expect_saving(_SAVING_S_PER_GB * size / 1e9 / world_size())
        done = self.restore(stage)
        if rank() == 0:
            with one_line(self.folder):
                replace_text(self.folder / "deepspeed.json", json.dumps(stage.policy.deepspeed_config, indent=2) + "\n")
        # Only now are all files of hub models there.
        self.checkpoints.fingerprint(self._inputs)
        self._bind_journal()
        return done

    def _advance(self, stage: Stage, done: int, write_report: WriteReport) -> None:
        profiler = Profiler(self.config.log.profiled, self.folder / "profile")
        settings = {**to_dict(self.config), "deepspeed": stage.policy.deepspeed_config}
        config, tokenizer = self.config.log, stage.policy.tokenizer
        log = Log(config, self.folder, self._steps, done or -1, settings, tokenizer)
        with log, self._reported(write_report):
            if self.config.checkpoint.is_on and self.saver.step is None:
                self._save(stage, done)
            if stage.eval_sets and done == 0:
                stage.progress.enter("evaluation", 0)
                with Doing("measuring the model on held-out prompts"):
                    stage.evaluate(0, stage.eval_sets)
                log.write(0, values := self.watched(0, stage))
                self._keep_best(stage, 0, values)
            step = done
            while step < self._steps and not self._best.exhausted:
                step += 1
                self._make_step(stage, step, profiler, log)
                self._finish_step(stage, step, log)
            if step < self._steps and step > done:
                write_prompts(self.folder, stage.tried_prompts())
                say(f"stopped after step {step}: eval.patience evaluations without a better {self._best}")
            stage.progress.enter("export")
            self._export(stage, step)
            stage.policy.engine.print_communication()

    def _make_step(self, stage: Stage, step: int, profiler: Profiler, log: Log) -> None:
        """Make a step. If it cannot be finished, the run is saved as it was before that step."""
        # Pickled, which copies states with a row for every prompt much faster than `deepcopy`.
        before = pickle.dumps(self._states(stage))
        try:
            is_first = step == self.start.step + 1
            with (
                profiler.step(step, stage.meter),
                Doing(f"step {step}: sampling, scoring and training") if is_first else nullcontext(),
            ):
                stage.step(step)
            if is_first and world_size() > 1 and (slow := slow_ranks(all_gather_objects(fallbacks))):
                say(f"WARNING: all ranks wait for those without a kernel: {slow}")
        except RunInterrupted:
            stage.progress.enter("saving")
            self._save_before(stage, step, before)
            raise self._interrupted(stage) from None
        except RunStopped as stop:
            if stage.last_rollout is not None:
                log.write_rollouts(step, *stage.last_rollout, always=True)
            self._save_before(stage, step, before)
            if self.saver.step is None:
                raise
            raise RunStopped(f"{stop}; the run is saved as it was after step {self.saver.step}") from stop

    def _save_before(self, stage: Stage, step: int, before: bytes) -> None:
        self.saver.finish(stage)
        if self.saver.step != step - 1:
            self.saver.save(stage, step - 1, pickle.loads(before))

    def _finish_step(self, stage: Stage, step: int, log: Log) -> None:
        """After a step, evaluate the policy, log the step's metrics, and save the run, where each is due."""
        is_last = step == self._steps
        self.saver.look(stage)
        if stage.last_rollout is not None:
            log.write_rollouts(step, *stage.last_rollout, stage.last_advantages_BT)
        saves = self.saver.is_due(step, stage)
        if saves or is_last:
            write_prompts(self.folder, stage.tried_prompts())
        if due := [of for of in stage.eval_sets if is_last or (of.every and step % of.every == 0)]:
            stage.progress.enter("evaluation")
            stage.evaluate(step, due)
        if self.config.log.details:
            log.write_trace(step, stages_of(stage.meter.spans))
        # Numbers before the checkpoint: a checkpoint without them would resume after a gap, while lines that lack a
        # checkpoint are cut off on resuming.
        log.write(step, values := self.watched(step, stage))
        self._act(stage, step)
        self._keep_best(stage, step, values)
        ends = not is_last and self._best.exhausted
        # After the last step the model is exported, which a resumed run would have to do too.
        stops = not is_last and not ends and stage.progress.stops()
        saves = saves and (is_last or not self._alarms.doubts)
        if (saves or stops or (ends and self.config.checkpoint.is_on)) and not self._alarms.diverged:
            self._save(stage, step, beside=not (is_last or stops or ends))
        if stops:
            raise self._interrupted(stage)

    @contextmanager
    def _reported(self, write_report: WriteReport) -> Iterator[None]:
        """Write report.html after the block, even if the run is stopped. A failed report does not fail the run."""
        stop: RunStopped | None = None
        try:
            yield
        except RunStopped as error:
            stop = error
        metrics = self.folder / "metrics.jsonl"
        # A run that could not write its first checkpoint has nothing to report, and prints why it ends.
        if rank() == 0 and metrics.exists() and metrics.stat().st_size:
            try:
                write_report(self.folder)
            except Exception as error:  # whatever it is, the run is whole without its report
                again = f"hybrid-grpo report {self.folder} writes it again"
                say(f"WARNING: report.html could not be written: {why(error, self.folder)}: {again}")
        if stop is not None:
            raise stop

    def _act(self, stage: Stage, step: int) -> None:
        """Act on the alarms of a step: raise RunStopped or RollBack if an alarm requires it."""
        try:
            if self._alarms.stops:
                self.saver.finish(stage)
                if self.config.checkpoint.is_on and not self._alarms.diverged:
                    self.saver.save(stage, step, self._states(stage))
            self._alarms.act(f"the newest checkpoint is from step {self.saver.step}")
        except (RunStopped, RollBack):
            # A repeated step must not learn from completions that a diverged policy has sampled.
            if rank() == 0:
                self.journal.clear()
            raise

    def _roll_back(self, stage: Stage, diverged: RollBack) -> int:
        """Go back to the newest checkpoint before the run diverged, lower the learning rate, and return its step."""
        self.saver.finish(stage)
        config, before = self.config.guard, diverged.since
        if self.saver.step == self._back_to and before == self._back_to + 1:
            # Bad weights show one step later: the checkpoint that the run rolled back to was already bad.
            before = min(before, self.saver.step)
        checkpoint, _ = self.checkpoints.newest_whole(before)
        if checkpoint is None or self.checkpoints.rollbacks >= config.max_rollbacks:
            why = f"no checkpoint precedes step {before}" if checkpoint is None else "guard.max_rollbacks is reached"
            raise RunStopped(f"{diverged}: {why}: no model was exported: lower policy.lr or policy.max_grad_norm")
        lr_scale, step = config.lr_factor * stage.policy.lr_scale, checkpoint.manifest.step
        note = f"{diverged}: back to step {step}, the learning rate times {lr_scale:g}"
        checkpoint = self.checkpoints.roll_back(checkpoint, lr_scale, note)
        self._bind_journal()
        self.saver.continue_from(checkpoint)
        self._run_folder.abandon_models(step)
        self._best.go_back(step, lines_before(self.folder / "metrics.jsonl", step))
        self._recall(checkpoint, load_stage(stage, self.checkpoints, checkpoint))
        say(f"ROLLBACK: {note}")
        return step

    def _bind_journal(self) -> None:
        """Tie the journal to this run, so that completions sampled by other weights are not reused."""
        self.journal.bind(identity(self.config, self.checkpoints.inputs, self.checkpoints.rollbacks))

    def _interrupted(self, stage: Stage) -> RunInterrupted:
        asked, step = f"stopped ({stage.progress.stop_reason()})", self.saver.step
        if step is None:
            return RunInterrupted(f"{asked}; nothing could be saved")
        return RunInterrupted(f"{asked}, saved after step {step} in {self.folder}: continue with --run.resume auto")

    def _save(self, stage: Stage, step: int, *, beside: bool = False) -> None:
        """Save the run after a step; the time that it waits for this is one of the step's metrics."""
        stage.progress.enter("saving", step)
        with stage.meter.time("time/checkpoint_s"):
            self.saver.save(stage, step, self._states(stage), beside=beside)

    def _keep_best(self, stage: Stage, step: int, values: dict[str, float]) -> None:
        if self._best.is_beaten(values):
            self.saver.finish(stage)
        if not self._alarms.diverged and (warning := self._best.take(stage.policy, step, values)):
            say(warning)

    def _export(self, stage: Stage, step: int) -> None:
        """Export `model/`, whose presence means that the run is finished, whole or not at all. Raises UserError."""
        self.saver.finish(stage)
        model = self.folder / "model"
        try:
            export(stage.policy, model, {"step": step})
        except WriteFailed as failure:
            if self.saver.step != step:
                self.saver.save(stage, step, self._states(stage))
            raise UserError(
                f"{model} could not be written: {failure}; the newest checkpoint, of step {self.saver.step}, has the"
                " weights: make room or fix the cause, and --run.resume auto writes the model again"
            ) from failure

    def watched(self, step: int, stage: Stage) -> dict[str, float]:
        """Return a step's metrics, reduced, with those that are alarms. Print and record the alarms that go off."""
        values = stage.meter.reduce()
        alarms = self._alarms.watch(step, values)
        for alarm in [*alarms, *self._alarms.over]:
            if alarm.message:
                say(f"ALARM: {alarm.message}")
            if rank() == 0:
                with one_line(self.folder):
                    write_alarm(self.folder, alarm)
        return values

    def restore(self, stage: Stage) -> int:
        """Restore a stage from the checkpoint at which the run starts, if any. Return the number of steps done. Until
        nothing can be refused any more, and every rank has loaded the stage, the run's folder stays as it was."""
        checkpoint = self.start.checkpoint
        state = load_stage(stage, self.checkpoints, checkpoint) if checkpoint is not None else {}
        if self.start.rewinds:
            self._run_folder.abandon_models(self.start.step)
        self._run_folder.begin(*self._head, self.start.lines, is_damaged=self.start.is_damaged)
        if self.start.rewinds:
            self.checkpoints.forget_after(self.start.step)
        if checkpoint is not None:
            self._recall(checkpoint, state)
            say(f"resumed {self.folder} after step {self.start.step}")
        return self.start.step

    def _recall(self, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
        """Restore the alarms to their state in a checkpoint."""
        manifest = checkpoint.manifest
        self._alarms.recall(self.folder, manifest.step, manifest.note)
        if "alarms" in state:
            self._alarms.load_state_dict(state["alarms"])
        self._back_to = manifest.step if manifest.note else -1

    def _states(self, stage: Stage) -> dict[str, Any]:
        parts = {**stage.all_parts, "alarms": self._alarms}
        return {name: part.state_dict() for name, part in parts.items()}


@contextmanager
def loaded_objects_kept() -> Iterator[None]:
    """Exclude the objects of libraries and models, which stay for the whole run, from garbage collection. With these
    half a million objects, a full collection would take 0.3 s, and 80 steps of the letters trigger 7 of them."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
