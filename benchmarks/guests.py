"""Groups with a right answer against groups of the policy alone, on the quickstart's task.

    python benchmarks/guests.py [--seeds 0,1] [--steps 60] [--warmup 25] [--lr 1e-3] [--sides SIDES] [--json FILE]

The policy is the quickstart's after a few steps of its supervised warm-up, so it is hardly ever right, and only whole
answers are rewarded. A group has eight completions: all by the policy (none), or seven and the right answer from a
file, which takes part in the loss with probability 1 (importance), or as if the policy had sampled it (imitation), or
only in the baseline (baseline). The runs are separate processes, one after the other. Accuracy is that of greedy
completions of the held-out words.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from ppo import SCRIPTS, run

SIDES = ("none", "importance", "imitation", "baseline")


def answers(task: Path) -> None:
    """The file of the guest: the right answer of every training prompt, with probability 1."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    with (task / "answers.jsonl").open("w") as file:
        for line in (task / "train.jsonl").read_text().splitlines():
            row = json.loads(line)
            ids = [*tokenizer(row["answer"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            of_tokens = {"token_ids": ids, "token_logp": [0.0] * len(ids)}
            file.write(json.dumps({"prompt": row["prompt"], "completion": row["answer"], **of_tokens}) + "\n")


def curve(folder: Path) -> dict[str, Any]:
    """Held-out accuracy by step, and the guest's metrics in the first and the last step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/step_s" in row]
    accuracy = {row["step"]: row["eval/heldout/accuracy"] for row in rows if "eval/heldout/accuracy" in row}
    ratios = [row["guests/answers/ratio_mean"] for row in steps if "guests/answers/ratio_mean" in row]
    return {
        "accuracy": accuracy,
        "seconds": sum(row["time/step_s"] for row in steps),
        "ratio": ratios[:1] + ratios[-1:],
    }


def measure(seed: int, steps: int, warmup: int, lr: str, sides: list[str]) -> dict[str, dict[str, Any]]:
    """The runs of a seed, by name."""
    with tempfile.TemporaryDirectory() as place:
        task, shared = Path(place, "task"), ["--run.dir", place, "--run.seed", str(seed), "--log.wandb", "disabled"]
        run(SCRIPTS / "quickstart_task.py", task, "--seed", str(seed), threads=1)
        answers(task)
        sft = ["sft", "--config", SCRIPTS / "quickstart_sft.yaml", "--policy.model", task / "model", *shared]
        run("-m", "hybrid_grpo", *sft, "--data.path", task / "sft.jsonl", "--run.steps", str(warmup), threads=1)
        train = [
            "train",
            "--config",
            SCRIPTS / "quickstart.yaml",
            "--policy.model",
            Path(place, "quickstart-sft/model"),
        ]
        train += [*shared, "--data.path", task / "train.jsonl", "--data.eval_path", task / "heldout.jsonl"]
        train += ["--rewards", "exact_match", "--run.steps", str(steps), "--eval.every", "20", "--policy.lr", lr]
        train += ["--checkpoint.every", "0", "--checkpoint.every_minutes", "0"]
        found = {}
        for side in sides:
            guest = [{"name": "answers", "path": str(task / "answers.jsonl"), "weight": side}]
            settings = [] if side == "none" else ["--guests.writers", json.dumps(guest)]
            run("-m", "hybrid_grpo", *train, "--run.name", side, *settings, threads=1)
            found[side] = curve(Path(place, side))
            shown = ", ".join(f"{value:.3f}" for value in found[side]["accuracy"].values())
            print(f"seed {seed} {side:10} {shown} in {found[side]['seconds']:.1f} s {found[side]['ratio']}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1", help="separated by commas")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=25)
    parser.add_argument("--lr", default="1e-3")
    parser.add_argument("--sides", default=",".join(SIDES), help="separated by commas")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    how = given.steps, given.warmup, given.lr, given.sides.split(",")
    seeds = {seed: measure(int(seed), *how) for seed in given.seeds.split(",")}
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"steps": given.steps, "warmup": given.warmup, "lr": given.lr, "seeds": seeds}
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
