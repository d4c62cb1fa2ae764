"""The life of a run around its steps: its folder, resuming, checkpoints, and what it leaves behind."""

import copy
import json
import platform
import subprocess
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hybrid_grpo.config import SftConfig, TrainConfig, to_dict
from hybrid_grpo.config.errors import RunStopped, UserError
from hybrid_grpo.config.parsing import Parsed
from hybrid_grpo.data.batch import Rollout, Scores
from hybrid_grpo.distributed import barrier, rank, world_size
from hybrid_grpo.policy import Policy
from hybrid_grpo.run.alarms import Alarms
from hybrid_grpo.run.checkpoint import Checkpoints, Shards
from hybrid_grpo.run.files import read_jsonl, replace_text
from hybrid_grpo.run.guard import Guard
from hybrid_grpo.run.metrics import Meter
from hybrid_grpo.run.report import write_report
from hybrid_grpo.run.sinks import Log


class Stateful(Protocol):
    """Something whose state a checkpoint holds."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class Stage:
    """A stage of training as a run sees it: something that makes steps, and has a state to save.

    Attributes:
        policy: what is trained.
        meter: reduced and logged after every step.
        parts: what a checkpoint holds beside the policy, by name.
        shards: tensors beside the policy's that a checkpoint holds.
        last_rollout: completions of the step, their scores and mean advantages; None where nothing is sampled.
        eval_every: steps between evaluations, 0: before the first and after the last; None: the stage has none.
    """

    policy: Policy
    meter: Meter
    parts: dict[str, Stateful]
    shards: Shards | None = None
    last_rollout: tuple[Rollout, Scores, Tensor] | None = None
    eval_every: int | None = None

    def step(self, step: int) -> None:
        """Make step k, counted from 1."""
        raise NotImplementedError

    def evaluate(self, step: int) -> None:
        """Measure the policy on held-out data after a step; step 0 is before the first."""
        raise NotImplementedError

    def tried_prompts(self) -> list[dict[str, Any]]:
        """Rows of prompts.jsonl; none where a stage keeps no success rates."""
        return []


class Run:
    """One run and its folder; raises UserError where the folder holds a run that is not to be resumed.

    `facts` are lines for the head of config.yaml: the batch equation, what the data held.
    """

    def __init__(self, parsed: Parsed[TrainConfig] | Parsed[SftConfig], facts: dict[str, str]) -> None:
        self.config = parsed.config
        run = parsed.config.run
        self.folder = Path(run.dir) / run.name
        self._alarms = Alarms(parsed.config.log)
        self._guard = Guard(parsed.config.guard, run.steps)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", parsed.config.checkpoint.keep)
        self.resumes = run.resume == "auto" and self.checkpoints.latest() is not None
        if run.resume == "never" and (self.folder / "metrics.jsonl").exists():
            raise UserError(
                f"run.name {run.name}: {self.folder} holds a run already: pass --run.resume auto to go on with it,"
                " or another --run.name"
            )
        # Every rank has looked for the folder before rank 0 makes it.
        barrier()
        if rank() == 0:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            head = "".join(f"# {name}: {fact}\n" for name, fact in {**_origin(), **facts}.items())
            (self.folder / "config.yaml").write_text(head + parsed.yaml)
        for name, fact in facts.items():
            self.say(f"{name}: {fact}")

    def say(self, message: str) -> None:
        """Print on rank 0. A run goes on where nobody reads it any more."""
        if rank() == 0:
            with suppress(OSError):
                print(message, flush=True)

    def train(self, stage: Stage) -> None:
        """Take a stage from the start or the newest checkpoint to the last step; then export the model and the report.

        Raises RunStopped where a step could not be finished; the run is saved as it was before that step.
        """
        if rank() == 0:
            (self.folder / "deepspeed.json").write_text(json.dumps(stage.policy.deepspeed_config, indent=2) + "\n")
        if stage.policy.adapters is not None:
            self.say(f"lora: {stage.policy.adapters}")
        done = saved = self.restore(stage)
        settings = {**to_dict(self.config), "deepspeed": stage.policy.deepspeed_config}
        with Log(self.config.log, self.folder, self.config.run.steps, done if self.resumes else -1, settings) as log:
            if stage.eval_every is not None and not self.resumes:
                stage.evaluate(0)
                log.write(0, self.watched(0, stage.meter.reduce()))
            for k in range(done + 1, self.config.run.steps + 1):
                before = {name: copy.deepcopy(part.state_dict()) for name, part in stage.parts.items()}
                try:
                    stage.step(k)
                except RunStopped as stop:
                    if stage.last_rollout is not None:
                        log.write_rollouts(k, *stage.last_rollout, always=True)
                    log.close()
                    if saved < k - 1:
                        self._save(stage, k - 1, before)
                    raise RunStopped(f"{stop}; the run is saved as it was after step {k - 1}") from stop
                if stage.last_rollout is not None:
                    log.write_rollouts(k, *stage.last_rollout)
                if self._is_due(k, self.config.checkpoint.every):
                    self._write_prompts(stage.tried_prompts())
                if stage.eval_every is not None and self._is_due(k, stage.eval_every):
                    stage.evaluate(k)
                # Numbers before the checkpoint: a checkpoint without them would resume behind a gap, while lines
                # without a checkpoint are cut again.
                log.write(k, values := self.watched(k, stage.meter.reduce()))
                for message in self._guard.judge(k, values):
                    self.say(f"GUARD: {message}")
                if (
                    self.config.checkpoint.every
                    and self._is_due(k, self.config.checkpoint.every)
                    and not self._guard.doubts
                ):
                    with stage.meter.time("time/checkpoint_s"):
                        self._save(stage, k, {name: part.state_dict() for name, part in stage.parts.items()})
                    saved = k
            stage.policy.export(self.folder / "model")
            stage.policy.engine.tell_communication()
        if rank() == 0:
            write_report(self.folder)

    def _is_due(self, step: int, every: int) -> bool:
        """Whether a step is the last one, or one of every `every` (0: none but the last)."""
        return step == self.config.run.steps or bool(every and step % every == 0)

    def _save(self, stage: Stage, step: int, states: dict[str, Any]) -> None:
        self.checkpoints.save(stage.policy.engine, step, {"policy": stage.policy.state_dict(), **states}, stage.shards)

    def _write_prompts(self, prompts: list[dict[str, Any]]) -> None:
        """Write prompts.jsonl: how often each prompt was solved, one JSON object a line."""
        if prompts and rank() == 0:
            lines = (json.dumps(prompt, ensure_ascii=False, default=str) + "\n" for prompt in prompts)
            replace_text(self.folder / "prompts.jsonl", "".join(lines))

    def watched(self, step: int, values: dict[str, float]) -> dict[str, float]:
        """The numbers of a step with its alarms; an alarm that goes off for the first time is also said."""
        for message in self._alarms.watch(step, values):
            self.say(f"ALARM: {message}")
        return values

    def restore(self, stage: Stage) -> int:
        """Go on from the newest checkpoint, if there is one and it is wanted; return the steps done."""
        state = self.checkpoints.load(stage.policy.engine, stage.shards) if self.resumes else None
        if state is None:
            return 0
        stage.policy.load_state_dict(state["policy"])
        for name, part in stage.parts.items():
            part.load_state_dict(state[name])
        # Only rank 0 has the metrics.
        for line in read_jsonl(self.folder / "metrics.jsonl") if rank() == 0 else ():
            if (step := line.pop("step")) <= state["step"]:
                self._alarms.remember(step, {name: value for name, value in line.items() if value is not None})
        self.say(f"resumed {self.folder} after step {state['step']}")
        return int(state["step"])


def _origin() -> dict[str, str]:
    packages = ("hybrid-grpo", "torch", "deepspeed", "transformers", "datasets")
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": ", ".join([f"python {platform.python_version()}", *(f"{p} {version(p)}" for p in packages)]),
        "git commit": _git_commit(),
        "ranks": str(world_size()),
    }


def _git_commit() -> str:
    """Commit of the git checkout that the package runs from; "none" where there is no checkout."""
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
