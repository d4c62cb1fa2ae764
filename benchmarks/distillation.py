"""On-policy distillation beside GRPO on the quickstart's task: completions until the student is as good as its teacher.

    python benchmarks/distillation.py [--seeds 0,1,2] [--steps 250] [--json FILE]

A seed determines the task and the weights after the supervised warm-up, and is the seed of all runs, which use the
quickstart's recipe on one rank. GRPO trains these weights for --steps; the result is the teacher, and its curve that of
GRPO alone. Then students start from the same weights for --student_steps, with rewards of weight 0: one with the
teacher in the advantages of tokens, one with the teacher in the loss. Accuracy is that of greedy completions of the
held-out words. The runs are separate processes, one after the other.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from ppo import SCRIPTS, curve, run, show

NO_REWARDS = "[{function: exact_match, weight: 0}, {function: letters_in_place, weight: 0}]"
SHARE = 0.95
"""The share of the teacher's accuracy that the student is to reach."""


def measure(seed: int, steps: int, student_steps: int, threads: int) -> dict[str, Any]:
    """All runs of a seed, by name."""
    with tempfile.TemporaryDirectory() as place:
        task, shared = Path(place, "task"), ["--run.dir", place, "--run.seed", str(seed), "--log.wandb", "disabled"]
        run(SCRIPTS / "quickstart_task.py", task, "--seed", str(seed), threads=threads)
        sft = ["sft", "--config", SCRIPTS / "quickstart_sft.yaml", "--policy.model", task / "model", *shared]
        run("-m", "hybrid_grpo", *sft, "--data.path", task / "sft.jsonl", threads=threads)
        model, found = Path(place, "quickstart-sft/model"), {}
        train = ["train", "--config", SCRIPTS / "quickstart.yaml", "--policy.model", model, *shared]
        train += ["--data.path", task / "train.jsonl", "--data.eval_path", task / "heldout.jsonl"]
        train += ["--checkpoint.every", "0", "--checkpoint.every_minutes", "0", "--run.name"]
        student = ["--run.steps", student_steps, "--eval.every", "5", "--teacher.model", Path(place, "grpo/model")]
        for name, settings in {
            "grpo": ["--run.steps", steps, "--eval.every", "10"],
            "advantage": [*student, "--rewards", NO_REWARDS],
            "loss": [*student, "--rewards", NO_REWARDS, "--teacher.into", "loss"],
        }.items():
            run("-m", "hybrid_grpo", *train, name, *settings, threads=threads)
            found[name] = curve(Path(place, name))
            if name == "grpo":
                goal = SHARE * found[name]["evaluations"][-1]["accuracy"]
            found[name]["completions_to_goal"] = reached(found[name], goal)
            goal_line = f"{goal:.3f} after {found[name]['completions_to_goal'] or 'no number of'} completions"
            print(f"seed {seed} {name:9} {goal_line}; {show(found[name])}", flush=True)
    return {"goal": goal, **found}


def reached(seen: dict[str, Any], goal: float) -> int | None:
    """Completions at the first evaluation that reaches an accuracy; None if none does."""
    points = (point["completions"] for point in seen["evaluations"] if point["accuracy"] >= goal)
    return next(points, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    parser.add_argument("--steps", type=int, default=250, help="of GRPO, which makes the teacher")
    parser.add_argument("--student_steps", type=int, default=100, help="of each student")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sizes = {"steps": given.steps, "student_steps": given.student_steps, "threads": given.threads}
    seeds = {seed: measure(int(seed), **sizes) for seed in given.seeds.split(",")}
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({**sizes, "share": SHARE, "seeds": seeds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
