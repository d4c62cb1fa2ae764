"""The cost of reward functions, and proof that bad ones cannot harm a run.

    python benchmarks/rewards.py [--parts hostile,throughput,overlap] [--json FILE]

hostile     200 steps on two ranks with hostile_rewards.py, which raises (5 %), hangs for ever (2 %), returns None
            (5 %) or NaN (2 %), allocates 8 GiB (1 %) or ends its process (1 %), and the same run without faults:
            counts in the metrics against those foreseen from the completions, rewards, seconds of a step. `unhidden_s`
            is what the slower rank must wait for its calls that hang, were there nothing else.
throughput  1,024 completions, a function of 50 ms, 8 workers: seconds against the ideal 6.4.
overlap     the same function beside a decoder that takes longer: the wait that is left.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from hostile_rewards import FAILURES, fate, reward

from hybrid_grpo.config import RewardConfig, ScoringConfig
from hybrid_grpo.data.batch import Completion, Prompt
from hybrid_grpo.rewards.loader import load_rewards
from hybrid_grpo.rewards.scorer import Rewards

ROOT = Path(__file__).parent.parent
RANKS, PROMPTS, WORKERS, TIMEOUT = 2, 16, 2, 0.5


def train(folder: Path, name: str, steps: int, faults: bool) -> list[dict[str, float]]:
    """The metrics of a run on two ranks, 16 prompts x 8."""
    rewards = [
        {
            "function": f"{ROOT / 'tests/support/hostile_rewards.py'}:hostile",
            "timeout_s": TIMEOUT,
            "kwargs": {"faults": faults},
        }
    ]
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
    command = [
        Path(sys.executable).with_name("deepspeed"),
        "--num_accelerators",
        str(RANKS),
        "--no_local_rank",
        "--module",
    ]
    arguments = [part for setting, value in settings.items() for part in (f"--{setting}", value)]
    done = subprocess.run(
        [*map(str, command), "hybrid_grpo", "train", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def counts(run: Path, rows: list[dict[str, float]]) -> dict[str, Any]:
    """The counts in the metrics of a run with faults, and those predicted from its completions."""
    counted: dict[str, int] = dict.fromkeys(("failed", "timeout", "none"), 0)
    foreseen = dict(counted)
    exact = wrong = 0
    unhidden_s = 0.0
    for row in rows:
        hangs = [0] * RANKS
        lines = (run / f"rollouts/step_{row['step']:06d}.jsonl").read_text().splitlines()
        for line in map(json.loads, lines):
            what = fate(line["prompt"], line["completion"])
            foreseen["failed"] += what in FAILURES
            foreseen["timeout"] += what == "hangs"
            hangs[line["group"] * RANKS // PROMPTS] += what == "hangs"
            foreseen["none"] += what == "none"
            value = reward(line["completion"]) if what == "scored" else None
            exact += line["rewards"]["hostile"] == value
            wrong += line["rewards"]["hostile"] != value
        for name in counted:
            counted[name] += round(row[f"reward/hostile/{name}_frac"] * len(lines))
        unhidden_s += max(math.ceil(count / WORKERS) for count in hangs) * TIMEOUT
    return {
        "completions": exact + wrong,
        "counted": counted,
        "foreseen": foreseen,
        "rewards as foreseen": exact,
        "rewards otherwise": wrong,
        "mean unhidden_s": unhidden_s / len(rows),
    }


def make_task(folder: Path) -> None:
    """The quickstart's, in `folder`/task."""
    script = ROOT / "training_scripts/quickstart_task.py"
    subprocess.run([sys.executable, script, folder / "task"], check=True, capture_output=True)


def hostile(steps: int) -> dict[str, Any]:
    """Two runs, with and without faults, and whether the counts are the predicted ones."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_task(folder)
        rows = train(folder, "faults", steps, True)
        plain = train(folder, "plain", steps, False)
        found = counts(folder / "faults", rows)
        return {
            "steps": len(rows),
            **found,
            "timeout_s": TIMEOUT,
            "median step_s": median(row["time/step_s"] for row in rows),
            "median step_s without faults": median(row["time/step_s"] for row in plain),
            "mean step_s": sum(row["time/step_s"] for row in rows) / steps,
            "mean step_s without faults": sum(row["time/step_s"] for row in plain) / steps,
            "mean reward_wait_s": sum(row["time/reward_wait_s"] for row in rows) / steps,
            "mean timeouts in a step": found["counted"]["timeout"] / steps,
        }


def slow(completions: list[str]) -> list[float]:
    """50 ms for each completion."""
    time.sleep(0.05 * len(completions))
    return [float(len(text)) for text in completions]


def scorer() -> Rewards:
    """`slow` in 8 workers, which have started already."""
    configs, scoring = [RewardConfig(f"{__file__}:slow")], ScoringConfig(workers=8)
    rewards = Rewards(load_rewards(configs, scoring), scoring)
    rewards.score([Prompt(i, "", [1], {}) for i in range(8)], [Completion([1], [0.0], "stop", "a")] * 8)
    return rewards


def throughput() -> dict[str, float]:
    """1,024 completions, all available at once."""
    rewards = scorer()
    prompts = [Prompt(i, f"p{i}", [1], {}) for i in range(1024)]
    start = time.perf_counter()
    scores = rewards.score(prompts, [Completion([1], [0.0], "stop", "a" * (i % 7)) for i in range(1024)])
    seconds = time.perf_counter() - start
    assert scores.reward_B.tolist() == [float(i % 7) for i in range(1024)]
    ideal = 1024 * 0.05 / 8
    return {"seconds": seconds, "ideal": ideal, "over ideal": seconds / ideal}


def overlap() -> dict[str, float]:
    """1,024 completions that arrive over 9 s, as from a decoder that takes longer than the functions' 6.4 s."""
    rewards = scorer()
    prompts = [Prompt(i, f"p{i}", [1], {}) for i in range(128)]
    start = time.perf_counter()
    with rewards.stream(prompts, 8) as stream:
        for row in range(1024):
            time.sleep(max(0.0, start + 9.0 * (row + 1) / 1024 - time.perf_counter()))
            stream.add(row // 8, row % 8, Completion([1], [0.0], "stop", "a"))
        decoded = time.perf_counter()
        stream.scores()
    end = time.perf_counter()
    return {
        "decoding_s": decoded - start,
        "reward_wait_s": end - decoded,
        "wait over step": (end - decoded) / (end - start),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="hostile,throughput,overlap")
    parser.add_argument("--steps", type=int, default=200, help="of the hostile run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    run = {"hostile": lambda: hostile(arguments.steps), "throughput": throughput, "overlap": overlap}
    found = {part: run[part]() for part in arguments.parts.split(",")}
    for part, numbers in found.items():
        print(part)
        for name, value in numbers.items():
            print(f"  {name:32} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
