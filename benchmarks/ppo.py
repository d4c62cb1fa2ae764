"""PPO against GRPO on the quickstart's task: cost and benefit of a critic, at equal completions.

    python benchmarks/ppo.py [--seeds 0,1,2] [--steps 250] [--critic '--critic.lr 1e-3'] [--json FILE]

A seed determines the task and the weights after the supervised warm-up, and is the seed of both runs, which use the
quickstart's recipe on one rank; the second adds `--critic.enabled true` and the settings of --critic. The runs are
separate processes, one after the other. Accuracy is that of greedy completions of the held-out words; seconds are those
of the steps, without evaluations and start; memory is the largest resident size of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "training_scripts"


def run(*arguments: str | Path, threads: int) -> None:
    """Run a Python command on one rank; its output is shown if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu", "WANDB_MODE": "disabled"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}")


def curve(folder: Path) -> dict[str, Any]:
    """A run's accuracies, seconds and memory, from its metrics."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/step_s" in row]
    seconds, points = 0.0, []
    for row in rows:
        seconds += row.get("time/step_s", 0.0)
        if "eval/heldout/accuracy" in row:
            completions = int(row.get("progress/completions", 0))
            accuracy = row["eval/heldout/accuracy"]
            points.append({"completions": completions, "seconds": seconds, "accuracy": accuracy})
    explained = [row["critic/explained_variance"] for row in steps if "critic/explained_variance" in row]
    return {
        "evaluations": points,
        "seconds_per_step": median(row["time/step_s"] for row in steps),
        "critic_seconds_per_step": median(row.get("time/critic_s", 0.0) for row in steps),
        "memory_gb": max(row["memory/rss_gb"] for row in steps),
        **({"explained_variance": median(explained)} if explained else {}),
    }


def measure(seed: int, steps: int, critic: list[str], threads: int) -> dict[str, dict[str, Any]]:
    """Both runs of a seed, by name."""
    with tempfile.TemporaryDirectory() as place:
        task, shared = Path(place, "task"), ["--run.dir", place, "--run.seed", str(seed), "--log.wandb", "disabled"]
        run(SCRIPTS / "quickstart_task.py", task, "--seed", str(seed), threads=threads)
        sft = ["sft", "--config", SCRIPTS / "quickstart_sft.yaml", "--policy.model", task / "model", *shared]
        run("-m", "hybrid_grpo", *sft, "--data.path", task / "sft.jsonl", threads=threads)
        train = [
            "train",
            "--config",
            SCRIPTS / "quickstart.yaml",
            "--policy.model",
            Path(place, "quickstart-sft/model"),
        ]
        train += [*shared, "--data.path", task / "train.jsonl", "--data.eval_path", task / "heldout.jsonl"]
        train += ["--run.steps", str(steps), "--checkpoint.every", "0", "--checkpoint.every_minutes", "0"]
        found = {}
        for name, settings in (("grpo", []), ("ppo", ["--critic.enabled", "true", *critic])):
            run("-m", "hybrid_grpo", *train, "--run.name", name, *settings, threads=threads)
            found[name] = curve(Path(place, name))
            print(f"seed {seed} {name:4} {show(found[name])}", flush=True)
    return found


def show(seen: dict[str, Any]) -> str:
    """One run as a line of text."""
    first, last = seen["evaluations"][0], seen["evaluations"][-1]
    return (
        f"accuracy {first['accuracy']:.3f} -> {last['accuracy']:.3f} after {last['completions']:,} completions in"
        f" {last['seconds']:.1f} s, {seen['seconds_per_step']:.3f} s a step, {seen['memory_gb']:.2f} GB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--critic", default="--critic.lr 1e-3", help="command line of the run with a critic")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    seeds = {
        seed: measure(int(seed), given.steps, shlex.split(given.critic), given.threads)
        for seed in given.seeds.split(",")
    }
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"steps": given.steps, "critic": given.critic, "threads": given.threads, "seeds": seeds}
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
