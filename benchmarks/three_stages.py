"""training_scripts/three_stages.sh for several seeds, and the last stage of each with the true score as the reward.

    python benchmarks/three_stages.py [--seeds 0,1,2] [--settings '--run.steps 500'] [--json FILE]

Everything runs as users run it, on two CPU ranks if there is no GPU, in an installed environment. The comparison has
the starting weights, prompts and settings of the last stage, and only another reward. Seconds are the wall time of the
whole script.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "training_scripts"))

from step import machine
from three_stages_summary import curve

ROOT = Path(__file__).parent.parent
THREADS = ((os.cpu_count() or 1) + 1) // 2
"""Of a rank, as launch.sh has it."""
TRUE_SCORE = "[{function: exact_match}, {function: letters_in_place}]"


def script(place: Path, seed: int, settings: list[str]) -> float:
    """Run the script; returns its seconds. Its output is shown if it fails."""
    environment = {**os.environ, "RUNS": str(place), "SEED": str(seed), "SKIP_SETUP": "1", "WANDB_MODE": "disabled"}
    command = ["bash", str(ROOT / "training_scripts/three_stages.sh"), *settings]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout}")
    return time.perf_counter() - start


def measure(seed: int, settings: list[str]) -> dict[str, Any]:
    """The summary of a seed's run, with its wall time, and the curve of the comparison."""
    with tempfile.TemporaryDirectory() as folder:
        runs, place = Path(folder), Path(folder, "three-stages")
        seconds = script(runs, seed, settings)
        found: dict[str, Any] = {"wall_seconds": seconds, **json.loads((place / "summary.json").read_text())}
        compared = ["--run.name", "against-true-score", "--rewards", TRUE_SCORE, "--run.resume", "auto"]
        script(runs, seed, [*settings, *compared])
        found["against_true_score"] = curve(place / "against-true-score")
    curves = found["curve"], found["against_true_score"]
    gain, possible = (points[-1]["true_score"] - points[0]["true_score"] for points in curves)
    return {**found, "share_of_gain": gain / possible}


def show(seed: int, found: dict[str, Any]) -> str:
    """A seed as a line of text."""
    model, before, after, true = found["reward_model"], found["before"], found["after"], found["against_true_score"][-1]
    return (
        f"seed {seed}: reward model {model['heldout_accuracy']:.3f} of {model['possible_accuracy']:.3f}; true score"
        f" {before['true_score']:.3f} -> {after['true_score']:.3f} (highest {found['best']['true_score']:.3f} at step"
        f" {found['best']['step']}), against the true score {true['true_score']:.3f}, share of the gain"
        f" {found['share_of_gain']:.2f}; {found['wall_seconds']:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    parser.add_argument("--settings", default="", help="settings of the last stage, for both sides")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    seeds: dict[str, Any] = {}
    for seed in given.seeds.split(","):
        seeds[seed] = measure(int(seed), shlex.split(given.settings))
        print(show(int(seed), seeds[seed]), flush=True)
        if given.json:
            command = shlex.join(["python", "benchmarks/three_stages.py", *sys.argv[1:]])
            about = {"command": command, "machine": machine(THREADS, None), "settings": given.settings, "seeds": seeds}
            given.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
