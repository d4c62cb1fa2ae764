"""Proof that bad reward functions cannot harm a run: its counts against those that its completions foresee.

    python benchmarks/rewards.py [--steps 200] [--json FILE]

A run on two ranks with hostile_rewards.py, which raises (5 %), hangs for ever (2 %), returns None (5 %) or NaN (2 %),
allocates 8 GiB (1 %) or ends its process (1 %).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from hostile_rewards import FAILURES, fate, reward

ROOT = Path(__file__).parent.parent
RANKS, PROMPTS, WORKERS, TIMEOUT = 2, 16, 2, 0.5


def train(folder: Path, name: str, steps: int) -> list[dict[str, float]]:
    """The metrics of a run on two ranks, 16 prompts x 8."""
    function = f"{ROOT / 'tests/support/hostile_rewards.py'}:hostile"
    rewards = [{"function": function, "timeout_s": TIMEOUT}]
    settings = {
        "run.dir": folder,
        "run.name": name,
        "run.steps": steps,
        "policy.model": folder / "task/model",
        "policy.dtype": "float32",
        "policy.lr": "1e-5",
        "data.path": folder / "task/train.jsonl",
        "rollout.prompts_per_step": PROMPTS,
        "scoring.workers": WORKERS,
        "rollout.num_generations": 8,
        "rollout.max_completion_tokens": 8,
        "rewards": json.dumps(rewards),
        "log.wandb": "disabled",
        "log.rollouts_every": 1,
    }
    launcher = [Path(sys.executable).with_name("deepspeed"), "--num_accelerators", RANKS, "--no_local_rank", "--module"]
    arguments = [part for setting, value in settings.items() for part in (f"--{setting}", value)]
    command = map(str, [*launcher, "hybrid_grpo", "train", *arguments])
    done = subprocess.run(list(command), capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def counts(run: Path, rows: list[dict[str, float]]) -> dict[str, Any]:
    """The counts in the metrics of a run with faults, and those predicted from its completions."""
    counted: dict[str, int] = dict.fromkeys(("failed", "timeout", "none"), 0)
    foreseen = dict(counted)
    exact = wrong = 0
    for row in rows:
        lines = (run / f"rollouts/step_{row['step']:06d}.jsonl").read_text().splitlines()
        for line in map(json.loads, lines):
            what = fate(line["prompt"], line["completion"])
            foreseen["failed"] += what in FAILURES
            foreseen["timeout"] += what == "hangs"
            foreseen["none"] += what == "none"
            value = reward(line["completion"]) if what == "scored" else None
            exact += line["rewards"]["hostile"] == value
            wrong += line["rewards"]["hostile"] != value
        for name in counted:
            counted[name] += round(row[f"reward/hostile/{name}_frac"] * len(lines))
    return {
        "completions": exact + wrong,
        "counted": counted,
        "foreseen": foreseen,
        "rewards as foreseen": exact,
        "rewards otherwise": wrong,
    }


def make_task(folder: Path) -> None:
    """The quickstart's, in `folder`/task."""
    script = ROOT / "training_scripts/quickstart_task.py"
    subprocess.run([sys.executable, script, folder / "task"], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_task(Path(folder))
        found = counts(Path(folder, "faults"), train(Path(folder), "faults", arguments.steps))
    for name, value in found.items():
        print(f"{name:32} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
