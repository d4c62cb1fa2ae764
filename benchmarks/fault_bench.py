"""A small run on two ranks to be broken, and the comparison of its results; see faults.py."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import yaml
from forks import Ranks
from launching import make_task
from paths import ROOT

PROGRAM = Path(__file__).with_name("fault_program.py")
RECIPE: dict[str, Any] = {
    "run": {"name": "run", "steps": 6, "resume": "auto"}, "policy": {"model": "model", "dtype": "float32", "lr": 1e-2},
    "engine": {"zero_stage": 3}, "data": {"path": "rows.jsonl", "eval_path": "heldout.jsonl", "eval_limit": 8},
    "rollout": {"prompts_per_step": 12, "num_generations": 4, "max_completion_tokens": 8},
    "grpo": {"beta": 0.02, "ref_every": 2, "ref_mix": 0.5},
    "rewards": [{"function": "exact_match"}, {"function": "early.py:early_letters", "weight": 0.5}],
    "curriculum": {"sampling": "difficulty"}, "eval": {"every": 2}, "checkpoint": {"every": 1, "keep": 3},
    "log": {"wandb": "disabled"},
}  # fmt: skip
REWARD = """
import json, os

fault = json.loads(os.environ.get("FAULT", "null")) or {}
spoilt = fault.get("poison") == "reward" and int(os.environ["RANK"]) == fault["rank"]


def early_letters(completions, trainer_state, **columns):
    if spoilt and trainer_state.global_step + 1 == fault["step"]:
        return [float("nan")] * len(completions)
    return [sum("a" <= letter <= "m" for letter in text) / max(len(text), 1) for text in completions]
"""


class Bench:
    """A folder with a model, data and a recipe; runs of it, whole and broken."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        make_task(folder)
        lines = (folder / "train.jsonl").read_text().splitlines()[:60]
        (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "early.py").write_text(REWARD)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
        self.whole = self.finished("whole", *self.run("whole"))
        self.seconds = self.took

    def arguments(self, name: str, *settings: str) -> list[str]:
        return ["train", "--config", "recipe.yaml", f"--run.dir={self.folder / name}", *settings]

    def ranks(self, name: str, *settings: str, world: int = 2, fault: dict[str, Any] | None = None) -> Ranks:
        environment = {"FAULT": json.dumps(fault), "FAULT_JUNK": str(self.folder / name / "junk")}
        return Ranks(PROGRAM, *self.arguments(name, *settings), world=world, cwd=self.folder, environment=environment)

    def run(self, name: str, *settings: str, world: int = 2, fault: Any = None) -> tuple[int, str]:
        """Start a run and wait for its end. Returns the status and the output."""
        start = time.monotonic()
        with self.ranks(name, *settings, world=world, fault=fault) as ranks:
            status = ranks.wait(600)
        self.took = time.monotonic() - start
        return status, "".join(ranks.output)

    def launched(self, name: str) -> subprocess.Popen[str]:
        """The same through the launcher, as in a recipe."""
        environment = {**os.environ, "GPUS": "2", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(ROOT)
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
        line = f'. {ROOT}/training_scripts/launch.sh; launch "$@"'
        command = ["bash", "-c", line, "launch", *self.arguments(name)]
        pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=environment, start_new_session=True, **pipe)

    def finished(self, name: str, status: int, said: str) -> dict[str, Any]:
        """The results of a run that has ended well."""
        if status:
            raise AssertionError(f"status {status}: {said.strip()[-600:]}")
        return self.left(self.folder / name / "run")

    def left(self, run: Path) -> dict[str, Any]:
        """What must be equal in two equal runs: metrics other than times, and files."""
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        moving = ("time/", "throughput/", "memory/")
        kept: dict[str, Any] = {
            f"metrics of step {row['step']}": {k: v for k, v in row.items() if not k.startswith(moving)} for row in rows
        }
        kept["steps"] = [row["step"] for row in rows]
        files = [*run.glob("rollouts/*"), *run.glob("model/**/*"), run / "prompts.jsonl"]
        return kept | {str(path.relative_to(run)): path.read_bytes() for path in files if path.is_file()}

    def same(self, name: str, status: int, said: str) -> None:
        """Raise AssertionError with the first difference, unless the results are those of the unbroken run."""
        ours = self.finished(name, status, said)
        different = sorted(key for key in ours.keys() | self.whole.keys() if ours.get(key) != self.whole.get(key))
        assert not different, f"differs from the whole run in {different[:4]}"

    def alive(self) -> list[int]:
        """Processes that work in this folder, and their descendants."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                here = Path(os.readlink(process / "cwd")).is_relative_to(self.folder)
                if here and (process / "stat").read_text().rpartition(") ")[2][0] != "Z":
                    found.append(int(process.name))
            except OSError:
                continue
        return found

    def gone_after(self, limit: float) -> float:
        """Seconds until no process is left; raises AssertionError, and kills them, after the limit."""
        start = time.monotonic()
        while left := self.alive():
            if time.monotonic() - start > limit:
                names = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80] for pid in left]
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"{len(left)} processes are left after {limit:.0f} s: {names[:3]}")
            time.sleep(0.05)
        return time.monotonic() - start

    def lines(self, name: str) -> int:
        """Steps in the metrics of a run."""
        path = self.folder / name / "run" / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0


def started(ranks: Ranks, limit: float = 120.0) -> None:
    """Wait until the fault has been reached."""
    start = time.monotonic()
    while not any("fault: " in text for text in ranks.so_far()):
        assert time.monotonic() - start < limit, "the fault was not reached"
        time.sleep(0.05)
