"""The life of a run around its steps: its folder, resuming, checkpoints, and what it leaves behind."""

from __future__ import annotations

import copy
import json
import platform
import subprocess
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from hybrid_grpo.config import SftConfig, TrainConfig
from hybrid_grpo.config.errors import RunStopped, UserError
from hybrid_grpo.config.parsing import Parsed
from hybrid_grpo.distributed import barrier, rank, world_size
from hybrid_grpo.policy import Policy
from hybrid_grpo.run.alarms import Alarms
from hybrid_grpo.run.checkpoint import Checkpoints, Shards
from hybrid_grpo.run.files import read_jsonl
from hybrid_grpo.run.metrics import Meter
from hybrid_grpo.run.report import write_report
from hybrid_grpo.run.sinks import Log


class Stateful(Protocol):
    """Something whose state a checkpoint holds."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class Run:
    """One run and its folder.

    Args:
        parsed: the configuration, also as the YAML that is stored.
        facts: lines for the head of config.yaml: the batch equation, what the data held.

    Raises:
        UserError: the folder holds a run already and is not to be resumed.
    """

    def __init__(self, parsed: Parsed[TrainConfig] | Parsed[SftConfig], facts: dict[str, str]) -> None:
        self.config = parsed.config
        run = parsed.config.run
        self.folder = Path(run.dir) / run.name
        self._alarms = Alarms(parsed.config.log)
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
            self.folder.mkdir(parents=True, exist_ok=True)
            head = "".join(f"# {name}: {fact}\n" for name, fact in {**_origin(), **facts}.items())
            (self.folder / "config.yaml").write_text(head + parsed.yaml)
        for name, fact in facts.items():
            self.say(f"{name}: {fact}")

    def say(self, message: str) -> None:
        """Print on rank 0."""
        if rank() == 0:
            Console(highlight=False, soft_wrap=True).print(message, markup=False)

    def write_engine_config(self, config: dict[str, Any]) -> None:
        """Store the complete DeepSpeed configuration."""
        if rank() == 0:
            (self.folder / "deepspeed.json").write_text(json.dumps(config, indent=2) + "\n")

    def loop(
        self,
        policy: Policy,
        parts: dict[str, Stateful],
        meter: Meter,
        step: Callable[[int], None],
        log: Log,
        done: int,
        shards: Shards | None = None,
    ) -> None:
        """Run the steps after `done`, with their checkpoints; then export the model and write the report.

        Args:
            policy: what is trained.
            parts: what a checkpoint holds beside the policy.
            meter: reduced and logged after every step.
            step: does step k, from 1.
            log: where numbers go.
            done: steps that were done before.
            shards: tensors beside the policy's that a checkpoint holds.
        """
        every, saved = self.config.checkpoint.every, done

        def save(k: int, states: dict[str, Any]) -> None:
            self.checkpoints.save(policy.engine, k, {"policy": policy.state_dict(), **states}, shards)

        for k in range(done + 1, self.config.run.steps + 1):
            before = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
            try:
                step(k)
            except RunStopped as stop:
                log.close()
                if saved < k - 1:
                    save(k - 1, before)
                raise RunStopped(f"{stop}; the run is saved as it was after step {k - 1}") from stop
            # Numbers first: a run resumed from a checkpoint without them would have a gap in its metrics, while lines
            # after the last checkpoint are cut when the run resumes.
            log.write(k, self.watched(k, meter.reduce()))
            if every and (k % every == 0 or k == self.config.run.steps):
                with meter.time("time/checkpoint_s"):
                    save(k, {name: part.state_dict() for name, part in parts.items()})
                saved = k
        policy.export(self.folder / "model")
        log.close()
        if rank() == 0:
            write_report(self.folder)

    def watched(self, step: int, values: dict[str, float]) -> dict[str, float]:
        """The numbers of a step with its alarms; an alarm that goes off for the first time is also said."""
        for message in self._alarms.watch(step, values):
            self.say(f"ALARM: {message}")
        return values

    def restore(self, policy: Policy, parts: dict[str, Stateful], shards: Shards | None = None) -> int:
        """Go on from the newest checkpoint, if there is one and it is wanted; return the steps done."""
        state = self.checkpoints.load(policy.engine, shards) if self.resumes else None
        if state is None:
            return 0
        policy.load_state_dict(state["policy"])
        for name, part in parts.items():
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
