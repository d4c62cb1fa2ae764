"""Steps of runs repeated by `replay-step`: the same tokens, loss and gradient norm, on one rank and on two.

    python benchmarks/replay.py --json benchmarks/results/replay.json
    python benchmarks/replay.py --steps 5 --prompts 16       fewer steps, of a smaller run

For one and for two ranks there is a run with the quickstart's model, settings and task, in float32, from untrained
weights, with a checkpoint after every second step. Random steps of it are repeated on the run's number of ranks
(`matched`) and on the other number (`crossed`). For each of the four it reports

    steps               number of steps repeated
    tokens_equal        steps in which all tokens of all completions equal the saved ones
    loss, grad_norm     largest difference from the logged value
    logp                largest difference of a token's log-probability from the saved one
    seconds             median of a replay, without the start of the process: the model and the engine, the checkpoint,
                        and a step on the way to every other one

and of writing the rollouts of a step (`writing`), 512 completions of random tokens and numbers, processor seconds and
bytes with log.tokens and without.

Ranks are forked from a process that has imported what they need, and repeat all their steps one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SUPPORT = ROOT / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

import forks  # noqa: E402
import torch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from hybrid_grpo.config import LogConfig  # noqa: E402
from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores  # noqa: E402
from hybrid_grpo.records.sinks import Log  # noqa: E402

STEPS = 30
NUMBERS = {"loss": "policy/loss", "grad_norm": "policy/grad_norm"}


def run(*lines: str, ranks: int, folder: Path) -> None:
    """Run commands one after the other in the same processes."""
    done = forks.run(SUPPORT / "command_lines.py", *lines, world=ranks, cwd=folder, timeout=7200)
    assert done.status == 0, done.err[-3000:]


def replayed(steps: list[int], made_on: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Steps of the run on `made_on` ranks, repeated on `ranks` ranks."""
    out = f"on_{ranks}_of_{made_on}"
    run(*(f"replay-step runs/on_{made_on} {step} --replay.out {out}" for step in steps), ranks=ranks, folder=folder)
    told = [json.loads((folder / out / f"step_{step:06d}.json").read_text()) for step in steps]
    whole = [s["completions"]["same"] == s["completions"]["made"] == s["completions"]["saved"] for s in told]
    return {
        **{"run_ranks": made_on, "ranks": ranks, "steps": len(steps), "tokens_equal": sum(whole)},
        **{
            name: max(abs(s["numbers"][metric]["replayed"] - s["numbers"][metric]["logged"]) for s in told)
            for name, metric in NUMBERS.items()
        },
        "logp": max(s["completions"]["logp"] for s in told),
        "completions": sum(s["completions"]["made"] for s in told),
        "seconds": round(statistics.median(s["seconds"] for s in told), 2),
    }


def writing(length: int, tokenizer: Any) -> dict[str, Any]:
    """The cost of writing a step's rollouts of 512 completions of `length` tokens."""
    drawn, values = random.Random(0), torch.randn(512, length)
    ids = [[drawn.randrange(len(tokenizer)) for _ in range(length)] for _ in range(512)]
    completions = [Completion(row, logp, "stop", "abcd") for row, logp in zip(ids, values.tolist(), strict=True)]
    prompts = [Prompt(number, "dcab=", [1] * 6, {"answer": "abcd"}) for number in range(64)]
    reward_B = values[:, 0].double()
    told = Rollout(prompts, completions, 8), Scores(reward_B, {"exact_match": reward_B}, {}), values[:, 0], values
    found: dict[str, Any] = {"completions": 512, "tokens_of_each": length}
    for name, tokens in (("without", False), ("with", True)):
        seconds = []
        with tempfile.TemporaryDirectory() as folder:
            with Log(LogConfig(trackers=[], tokens=tokens), Path(folder), steps=1, tokenizer=tokenizer) as log:
                for step in range(1, 12):
                    start = time.process_time()
                    log.write_rollouts(step, *told, always=True)
                    seconds.append(time.process_time() - start)
            sizes = [path.stat().st_size for path in Path(folder, "rollouts").glob("step_000001.*")]
        # The first call loads modules.
        found[name] = {"processor_ms": round(1e3 * statistics.median(seconds[1:]), 2), "bytes": sum(sizes)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="made again, of each run on each number of ranks")
    parser.add_argument("--prompts", type=int, default=64, help="of a step, each completed 8 times")
    parser.add_argument("--seed", type=int, default=0, help="which steps are drawn")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "steps_of_the_run": STEPS,
        "prompts_per_step": arguments.prompts,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = forks.run(ROOT / "training_scripts" / "quickstart_task.py", folder / "task", cwd=folder)
        assert done.status == 0, done.err
        train = (
            f"train --config {ROOT}/training_scripts/quickstart.yaml --policy.model task/model --data.path"
            f" task/train.jsonl --run.steps {STEPS} --policy.lr_schedule constant --checkpoint.every 2"
            f" --checkpoint.keep {STEPS} --log.rollouts_every 1 --log.wandb disabled --eval.every 0"
            f" --rollout.prompts_per_step {arguments.prompts}"
        )
        tokenizer = AutoTokenizer.from_pretrained(folder / "task" / "model")
        result["writing"] = [writing(length, tokenizer) for length in (8, 512)]
        print(json.dumps(result["writing"]), flush=True)
        for ranks in (1, 2):
            run(f"{train} --run.name on_{ranks}", ranks=ranks, folder=folder)
        steps = sorted(random.Random(arguments.seed).sample(range(1, STEPS + 1), arguments.steps))
        for kind, pairs in {"matched": ((1, 1), (2, 2)), "crossed": ((1, 2), (2, 1))}.items():
            for made_on, ranks in pairs:
                found = replayed(steps, made_on, ranks, folder)
                result.setdefault(kind, []).append(found)
                print(json.dumps(found), flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
