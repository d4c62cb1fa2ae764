"""A folder in which the commands of hybrid_grpo are run, as a user would."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forks
import yaml
from forks import Done
from launching import make_task
from warm_python import programs

from hybrid_grpo.run.local_ranks import free_port

REWARDS = """
import os

def early_letters(completions, **columns):
    return [sum("a" <= letter <= "m" for letter in text) / max(len(text), 1) for text in completions]

def raises(completions, **columns):
    if os.environ["RANK"] == os.environ["BAD_RANK"]:
        raise ValueError("no luck\\nwith this")
    return [0.0] * len(completions)

def early_letters_unless_broken(completions, trainer_state):
    if trainer_state.global_step == 3 and os.path.exists("broken"):
        raise OSError("no service")
    return early_letters(completions)
"""
BROKEN_REWARDS = "import a_module_that_is_not_there\n\ndef reward(completions):\n    return [0.0] * len(completions)\n"


class Workshop:
    """A folder with a tiny model, a task and a recipe; commands run in it, two at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pool = ThreadPoolExecutor(2)
        make_task(folder)
        words = ["dcab", "zxy", "hello", "qrs", "tac", "god", "mnbv", "lkj", "poiu", "ytr", "ewq", "asdf"]
        rows = [{"prompt": f"{word}=", "answer": "".join(sorted(word))} for word in words]
        self.write("train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        self.write("heldout.jsonl", "".join(json.dumps(row) + "\n" for row in rows[:5]))
        pairs = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
        self.write("pairs.jsonl", "".join(json.dumps(pair) + "\n" for pair in pairs))
        self.write("my_rewards.py", REWARDS)
        self.write("broken_rewards.py", BROKEN_REWARDS)
        shared: dict[str, Any] = {
            "policy": {"model": "model", "dtype": "float32", "lr": 1e-2},
            "engine": {"zero_stage": 0},
            "log": {"wandb": "disabled"},
        }
        train = {
            "run": {"steps": 4}, **shared, "data": {"path": "train.jsonl", "eval_path": "heldout.jsonl"},
            "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_tokens": 8},
            "rewards": [{"function": "my_rewards.py:early_letters"}, {"function": "exact_match", "weight": 0.5}],
            "eval": {"threshold": 0.5},
        }  # fmt: skip
        sft = {"run": {"steps": 2}, **shared, "data": {"path": "pairs.jsonl"}, "sft": {"batch_size": 4}}
        self.write("train.yaml", yaml.safe_dump(train))
        self.write("sft.yaml", yaml.safe_dump(sft))

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(self, *arguments: str, ranks: int = 1, **environment: str) -> Done:
        """One command, on so many ranks."""
        return forks.run("-m", "hybrid_grpo", *arguments, world=ranks, cwd=self.folder, environment=environment)

    def launch(self, *arguments: str, ranks: int) -> Done:
        """One command under the deepspeed launcher."""
        start = time.monotonic()
        launcher = [str(programs() / "deepspeed"), "--num_accelerators", str(ranks), "--no_local_rank"]
        # The rendezvous of a launch of another test must not be met.
        launcher += ["--master_port", free_port(), "--module", "hybrid_grpo"]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [*launcher, *arguments]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=240)
        return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - start)

    def later(self, work: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(work)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
