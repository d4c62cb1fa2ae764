"""The tasks of objectives.py, and one training run of them: ours, or TRL's. A run takes one thread."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learning import learning_rates
from ppo import curve
from step import SIDES, Worker
from step_workloads import Job

sys.path.append(str(Path(__file__).parent.parent / "tests/support"))

import forks
from paths import ROOT

HERE, SCRIPTS = ROOT / "benchmarks", ROOT / "training_scripts"
QUIET = ("--log.wandb", "disabled", "--engine.zero_stage", "0")
SAMPLES = ("--eval.temperature", "1", "--eval.num_generations", "4")
"""Accuracy is that of four samples for each held-out prompt."""
RIGHT = "RIGHT_ANSWERS"
"""In a run's settings: the file of `right_answers`."""
EVALUATIONS = 4
"""In a run of ours, beside that of the warm-up."""


@dataclass(frozen=True)
class Task:
    """A task, its warm-up, and the size of its runs."""

    program: tuple[str | Path, ...]
    """Writes the task to a folder."""
    warm_up: tuple[str | Path, ...]
    """Command line of `sft`."""
    train: tuple[str | Path, ...]
    """Command line of `train`."""
    steps: int
    longest_prompt: int
    """In tokens, counted for TRL's micro-batches."""


QUICKSTART = ("--config", SCRIPTS / "quickstart.yaml", "--rollout.prompts_per_step", "32")
HERE_AND_NOW = {"isolation": "none", "batch_size": "group"}
EXACT = {"function": "benchmarks/objectives_rewards.py:exact", **HERE_AND_NOW}
SOLVED = {"function": "benchmarks/objectives_rewards.py:solved", **HERE_AND_NOW}
TASKS = {
    "letters": Task(
        (SCRIPTS / "quickstart_task.py",),
        ("--config", SCRIPTS / "quickstart_sft.yaml"),
        QUICKSTART,
        steps=60,
        longest_prompt=7,
    ),
    "words": Task(
        (SCRIPTS / "quickstart_task.py", "--ragged"),
        ("--config", SCRIPTS / "quickstart_sft.yaml"),
        (*QUICKSTART, "--rollout.max_completion_tokens", "26"),
        steps=60,
        longest_prompt=25,
    ),
    "countdown": Task(
        (HERE / "countdown_task.py",),
        ("--config", SCRIPTS / "quickstart_sft.yaml", "--run.steps", "300"),
        (*QUICKSTART, "--rewards", json.dumps([SOLVED])),
        steps=60,
        longest_prompt=7,
    ),
    "lookup": Task(
        (SCRIPTS / "lookup_task.py",),
        ("--config", SCRIPTS / "lookup_sft.yaml"),
        ("--config", SCRIPTS / "lookup.yaml"),
        steps=40,
        longest_prompt=16,
    ),
}


@dataclass(frozen=True)
class Run:
    """A training run."""

    task: str
    name: str
    seed: int
    steps: int
    settings: list[str] = field(default_factory=list)
    """Command line of `train`, beyond the task's."""
    trl: dict[str, Any] | None = None
    """Settings of TRL's GRPOConfig, beyond those that equal ours; None: a run of ours."""

    @property
    def identity(self) -> dict[str, Any]:
        """What a stored result must have been measured with."""
        return {"steps": self.steps, "settings": self.settings, "trl": self.trl}


def run(*arguments: str | Path) -> str:
    """The output of a Python command on one rank; it is shown if the command fails."""
    done = forks.run(*arguments, cwd=ROOT, timeout=3600.0)
    if done.status:
        raise SystemExit(f"{' '.join(map(str, arguments))}\n{done.out}{done.err}")
    return done.out


def warmed_up(task: str, seed: int, work: Path) -> Path:
    """The folder of a task and its model after the supervised warm-up, made once."""
    folder = work / f"{task}-{seed}"
    if folder.exists():
        return folder
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    run(*TASKS[task].program, part / "task", "--seed", str(seed))
    shared = ["--run.dir", part, "--run.name", "warm", "--run.seed", str(seed), *QUIET]
    data = ["--policy.model", part / "task/model", "--data.path", part / "task/sft.jsonl"]
    run("-m", "hybrid_grpo", "sft", *TASKS[task].warm_up, *data, *shared)
    return part.rename(folder)


def arguments(of: Run, warm: Path) -> list[str]:
    """Command line of `train`."""
    task = TASKS[of.task]
    shared = ["--run.seed", of.seed, "--run.steps", of.steps, "--eval.every", max(1, of.steps // EVALUATIONS), *QUIET]
    data = ["--data.path", warm / "task/train.jsonl", "--data.eval_path", warm / "task/heldout.jsonl"]
    # The rows are in random order, and TRL's side takes them as they are.
    order = ["--data.shuffle", "false", "--policy.model", warm / "warm/model"]
    saving = ["--checkpoint.every", "0", "--checkpoint.every_minutes", "0"]
    settings = [
        setting.replace(RIGHT, str(right_answers(warm))) if RIGHT in setting else setting for setting in of.settings
    ]
    return list(map(str, [*task.train, *shared, *data, *order, *saving, *SAMPLES, *settings]))


def right_answers(warm: Path) -> Path:
    """The file of a guest that gives the right answer of each training prompt, made once."""
    file = warm / "right.jsonl"
    if not file.exists():
        rows = map(json.loads, (warm / "task/train.jsonl").read_text().splitlines())
        right = {row["prompt"]: row["answer"] for row in rows}
        lines = [json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in right.items()]
        part = file.with_suffix(f".{threading.get_ident()}")
        part.write_text("".join(lines))
        part.replace(file)
    return file


def measured(of: Run, warm: Path, trl_python: Path | None) -> dict[str, Any]:
    """Accuracies after numbers of completions, and seconds of the run with its start."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if of.trl is None:
            run("-m", "hybrid_grpo", "train", *arguments(of, warm), "--run.dir", folder, "--run.name", "run")
            points = curve(folder / "run")["evaluations"]
        else:
            assert trl_python is not None
            points = [_trl(of, warm, trl_python, folder)]
    return {
        "completions": [point["completions"] for point in points],
        "accuracy": [point["accuracy"] for point in points],
        "wall_s": round(time.perf_counter() - start, 1),
    }


def _trl(of: Run, warm: Path, python: Path, folder: Path) -> dict[str, Any]:
    """Completions and accuracy at the end of a run of TRL's trainer."""
    spec = Job(arguments(of, warm), TASKS[of.task].longest_prompt).spec(0, threads=1)
    rollout = spec["config"]["rollout"]
    spec |= {"learning_rates": learning_rates(spec["config"]), "trl": of.trl}
    weights = folder / "weights"
    with Worker("trl", SIDES["trl"], spec, python, folder) as worker:
        worker.answer()
        for _ in range(of.steps):
            worker.step()
        worker.ask(save=str(weights))
    recipe = folder / "config.yaml"
    recipe.write_text(json.dumps(spec["config"]))
    said = run("-m", "hybrid_grpo", "eval", "--config", recipe, "--policy.model", weights)
    accuracy = json.loads(said.splitlines()[-1])["eval/heldout/accuracy"]
    rows = rollout["prompts_per_step"] * rollout["num_generations"]
    return {"completions": of.steps * rows, "accuracy": accuracy}
