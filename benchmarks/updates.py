"""The same completions in both trainers, ours and TRL's GRPOTrainer: how far apart are their weights at the end?

    python benchmarks/updates.py --steps 40 --grpo.num_iterations 2 --json FILE

Ours samples, as in learning.py, and TRL uses these completions in place of its own. Rewards, advantages, loss, clipping
and optimizer are each side's own. Further options are passed to both sides as settings of `train`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from learning import learning_rates
from step import SIDES, Worker, machine, set_accelerator, trl_environment
from step_workloads import quickstart


def distance(one: Path, other: Path) -> float:
    """Euclidean distance over all weights of two model folders."""
    from safetensors.torch import load_file

    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert a.keys() == b.keys(), "models of different parts"
    return float(sum((a[name].double() - b[name].double()).square().sum() for name in a) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between two looks at the weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of both sides")
    parser.add_argument("--trl-python", type=Path, help="see step.py")
    parser.add_argument("--json", type=Path)
    arguments, settings = parser.parse_known_args()
    set_accelerator()
    trl_python = arguments.trl_python or trl_environment()
    rows = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        job = quickstart(folder, arguments.seed, ragged=True)
        spec = job.spec(0, arguments.threads, ["--run.steps", str(arguments.steps), *settings])
        start = Path(spec["config"]["policy"]["model"])
        spec |= {"learning_rates": learning_rates(spec["config"]), "rollouts": str(folder / "rollouts")}
        (folder / "rollouts").mkdir()
        workers = [
            stack.enter_context(Worker(side, SIDES[side], spec, trl_python, folder)) for side in ("hybrid", "trl")
        ]
        for worker in workers:
            worker.answer()
        for step in range(1, arguments.steps + 1):
            for worker in workers:
                worker.step()
            if step % arguments.every and step != arguments.steps:
                continue
            for worker in workers:
                worker.ask(save=str(folder / f"{worker.name}-weights"))
            ours, theirs = (folder / f"{worker.name}-weights" for worker in workers)
            rows.append({"step": step, "moved": distance(ours, start), "apart": distance(ours, theirs)})
            print("step {step:4}  moved {moved:.4f}  apart {apart:.1e}".format(**rows[-1]), flush=True)
    if arguments.json:
        result = {"settings": settings, "machine": machine(arguments.threads, trl_python), "weights": rows}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
