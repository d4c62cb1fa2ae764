"""Starts and ends the process that shows a run on wandb (`follower.py`) from rank 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybrid_grpo.config import LogConfig
from hybrid_grpo.config.secrets import masked
from hybrid_grpo.distributed.workers.family import descendants, kill
from hybrid_grpo.records.files import json_safe
from hybrid_grpo.records.trackers import follower
from hybrid_grpo.records.trackers.follower import FAILED, LIMIT_SECONDS, OFF, say
from hybrid_grpo.records.trackers.wandb import resolve_wandb_mode, wandb_host

_NICENESS = "10"


def start_tracker(config: LogConfig, folder: Path, settings: dict[str, Any], done: int) -> TrackerProcess | None:
    mode = resolve_wandb_mode(config.wandb)
    if mode == "disabled":
        return None
    if mode == "online":
        shown = f"wandb: settings, metrics, prompts and completions go to {wandb_host()}"
        say(f"{shown}; --log.wandb offline keeps them in the run's folder", sys.stdout)
    try:
        return TrackerProcess(folder, config, settings, done)
    except OSError as error:
        say(f"{OFF}: no process can be started: {error.strerror}", sys.stderr)
        return None


class TrackerProcess:
    """The process of wandb. It reads what it shows from the run's folder; rank 0 waits for it only in `close`."""

    def __init__(
        self, folder: Path, config: LogConfig, settings: dict[str, Any], done: int = -1, limit_s: float = LIMIT_SECONDS
    ) -> None:
        """
        Args:
            done: the last step of a resumed run that wandb already has; -1 for a new run.
            limit_s: seconds after which wandb counts as hanging.
        """
        self._warned = False
        package = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        given = {
            **{"folder": str(folder.absolute()), "done": done, "limit_s": limit_s},
            **{"log": masked(asdict(config)), "settings": json_safe(settings)},
        }
        with tempfile.TemporaryFile() as file:  # a pipe may fill up before anybody reads it
            file.write(json.dumps(given).encode())
            file.seek(0)
            self._process = subprocess.Popen(
                # It starts while the ranks make the first steps.
                ["nice", "-n", _NICENESS, sys.executable, "-m", follower.__name__, str(file.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[file.fileno()],
                start_new_session=True,
            )
        with suppress(OSError):
            # Linux may share processors among sessions, among which the niceness of a session counts alone.
            Path(f"/proc/{self._process.pid}/autogroup").write_text(_NICENESS)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._input, self._output, self._errors = self._process.stdin, self._process.stdout, self._process.stderr
        for pipe in (self._output, self._errors):
            os.set_blocking(pipe.fileno(), False)

    def look(self) -> None:
        """Print what the process says, and warn once if it has ended without reporting why."""
        status = self._process.poll()
        # This process prints it: only it knows of the live line that is on the terminal.
        for pipe, stream in ((self._output, sys.stdout), (self._errors, sys.stderr)):
            if said := pipe.read():
                say(said.decode(errors="replace").removesuffix("\n"), stream)
        if status not in (None, 0, FAILED) and not self._warned:
            self._warned = True
            say(f"{OFF}: its process ended with status {status}", sys.stderr)

    def ask(self, failed: bool = False) -> None:
        self.look()
        with suppress(OSError):
            self._input.write(b"failed\n" if failed else b"ended\n")
            self._input.flush()

    def close(self, patience_s: float) -> None:
        """Wait at most `patience_s` seconds for wandb to finish, then kill it."""
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            limit = f"within {patience_s:.0f} s of the end of the run"
            say(f"WARNING: wandb did not finish {limit}, and was killed", sys.stderr)
            kill([self._process.pid, *descendants(self._process.pid)])
            self._warned = True
            self._process.wait()
        self.look()
        for pipe in (self._input, self._output, self._errors):
            with suppress(OSError):
                pipe.close()
