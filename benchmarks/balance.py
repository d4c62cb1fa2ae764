"""Balanced training: how unequal ranks are, what `grpo.balance` makes of it, and what a step gains.

    python benchmarks/balance.py [--ranks 1 2 3] [--draws 5] [--repeats 3] --json benchmarks/results/balance.json

`simulated` has no model: groups of 16 completions with log-normal lengths, whose prompts differ by 0.7 in log length,
are assigned to up to 64 ranks; the numbers are the tokens of the busiest rank over the mean, in the mean of the draws.

`ranks` are real: DeepSpeed's launcher, ZeRO-3, the quickstart's model in float32, 8 prompts with 8 completions on each
rank, and completions that are ended at given lengths. In *mixed* every prompt has a length at random (log-normal, at
most 8 times the median); in *skewed* those of the first rank are 4 times as long. *idle 50* is *mixed*, but 50 % of the
groups have equal rewards, and leave the backward pass. On one rank, where nothing can be balanced, `off` is with all
rows in the backward pass and `auto` without those. Each rollout is sampled once and trained on at a learning rate of
0 with and without balance in turn, so that both see the same weights. Reported are medians of the draws:

    train, step     processor seconds of the rank that has most, of everything after the rewards, and with the rollout:
                    what they take if every rank has a core; of training the best of the repeats
    train_wall      seconds of training on the cores that were free
    ratio           balanced over not
    busiest, costs  tokens and operations of the rank that has most over the mean; `busiest_at_most` in any draw
    gap             the largest difference in loss, and relative difference in gradient norm, of any draw
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "training_scripts"))

from quickstart_task import make_model, make_rows, make_tokenizer  # noqa: E402
from step_hybrid import forced  # noqa: E402

from hybrid_grpo import engine  # noqa: E402
from hybrid_grpo.config import TrainConfig  # noqa: E402
from hybrid_grpo.config.checks import check_train  # noqa: E402
from hybrid_grpo.config.parsing import parse  # noqa: E402
from hybrid_grpo.grpo.balance import assign  # noqa: E402
from hybrid_grpo.model.ranks import all_gather_objects, barrier, rank, world_size  # noqa: E402
from hybrid_grpo.policy import Policy  # noqa: E402
from hybrid_grpo.run.inputs import RunInputs  # noqa: E402
from hybrid_grpo.trainer import Trainer  # noqa: E402

PROMPTS, GROUP, MEDIAN = 8, 8, 40
"""Prompts of a rank, completions of a prompt, and the median of their lengths in tokens."""
WORKLOADS, ALONE = ("mixed", "skewed", "idle 50"), ("idle 0", "idle 30", "idle 60", "idle 90")
"""On several ranks, and on one."""
SIMULATED = ((8, 128), (8, 32), (64, 512))


def draw_lengths(draw: random.Random, groups: int, size: int, median: float) -> list[list[int]]:
    """Return the lengths of groups of completions, whose prompts differ by 0.7 in log length and they by 0.5."""
    means = [math.log(median) + draw.gauss(0, 0.7) for _ in range(groups)]
    return [
        [min(max(1, round(math.exp(draw.gauss(mean, 0.5)))), int(8 * median)) for _ in range(size)] for mean in means
    ]


def simulated(ranks: int, prompts: int, draws: int = 200) -> dict[str, float]:
    """Return the tokens of the busiest rank over the mean, with and without balance."""
    draw, ratios = random.Random(0), []
    for _ in range(draws):
        tokens = [float(sum(group)) for group in draw_lengths(draw, prompts, 16, 1000)]
        cost_RP = torch.tensor(tokens).double().view(ranks, -1)
        given = cost_RP, torch.zeros_like(cost_RP, dtype=torch.bool), 1
        ratios.append([1 / assign(*given, may_move)[1] for may_move in (False, True)])
    off, auto = (statistics.fmean(of) for of in zip(*ratios, strict=True))
    return {"off": round(off, 3), "auto": round(auto, 3)}


def reward(prompts: list[str], completions: list[str]) -> list[float]:
    """Rewards that differ within a group; in `idle` they are equal in a share of the groups."""
    kind, _, share = os.environ["WORKLOAD"].partition(" ")
    few = int(share) if kind == "idle" else 0
    pairs = zip(prompts, completions, strict=True)
    return [0.0 if 37 * sum(map(ord, p)) % 100 < few else sum(map(ord, c)) % 97 / 97 for p, c in pairs]


def build(folder: Path) -> Trainer:
    """A trainer as in commands/train.py, whose optimizer steps change nothing."""
    settings = {
        **{"policy.model": folder / "model", "policy.dtype": "float32", "policy.warmup_steps": 10**9},
        **{"data.path": folder / "train.jsonl", "rollout.prompts_per_step": PROMPTS * world()},
        **{"rollout.num_generations": GROUP, "rollout.max_completion_tokens": 8 * 4 * MEDIAN},
        **{"rollout.ignore_eos": True, "rewards": f"[{{function: {__file__}:reward}}]", "log.wandb": "disabled"},
    }
    config = parse(TrainConfig, [f"--{name}={value}" for name, value in settings.items()], "train").config
    plan, device, inputs = check_train(config, world()), engine.start(), RunInputs.read(config)
    policy = Policy(config.policy, config.engine, inputs.tokenizer, total_steps=10**9, decoder=config.rollout.decoder)
    return Trainer(config, plan, policy, None, inputs, device)


def world() -> int:
    return int(os.environ["WORLD_SIZE"])


def measured(trainer: Trainer, number: int, repeats: int) -> dict[str, Any]:
    """Sample a rollout, and train on it with and without balance in turn."""
    draw, workload = random.Random(number), os.environ["WORKLOAD"]
    lengths = draw_lengths(draw, PROMPTS * world_size(), GROUP, MEDIAN)
    if workload == "skewed":
        lengths = [[4 * n for n in group] if place < PROMPTS else group for place, group in enumerate(lengths)]
    watch = Watch()
    with forced(lengths[PROMPTS * rank() : PROMPTS * (rank() + 1)]):
        rollout, scores = trainer.collect(number)
    sampled = watch.end()
    trainer.meter.reduce()
    own = [
        len(prompt.token_ids) + sum(group)
        for prompt, group in zip(rollout.prompts, lengths[PROMPTS * rank() :], strict=False)
    ]
    tokens = [count for counts in all_gather_objects(own) for count in counts]
    seen: dict[str, list[Seconds]] = {"off": [], "auto": []}
    busiest, values, highest = {}, {}, trainer.highest
    for _ in range(repeats):
        for way, seconds in seen.items():
            trainer.config = replace(trainer.config, grpo=replace(trainer.config.grpo, balance=way))
            trainer.highest = highest if world() > 1 or way == "auto" else None
            watch = Watch()
            trainer.learn(rollout, scores)
            seconds.append(watch.end())
            values[way] = trainer.meter.reduce()
            takers = [taker for of_rank in trainer.assignment.taker_RP for taker in of_rank]
            loads = torch.zeros(world()).index_add(0, torch.tensor(takers), torch.tensor(tokens).float())
            busiest[way] = float(loads.max() / loads.mean())
    loss, norm = ([values[way][f"policy/{name}"] for way in seen] for name in ("loss", "grad_norm"))
    trainer.highest = highest
    return {
        "train": {way: min(processor for processor, _ in seconds) for way, seconds in seen.items()},
        "step": {way: sampled[0] + min(processor for processor, _ in seconds) for way, seconds in seen.items()},
        "train_wall": {way: min(wall for _, wall in seconds) for way, seconds in seen.items()},
        "busiest": busiest,
        "costs": {way: 1 / values[way].get("throughput/balance", 1) for way in seen},
        "no_gradient_frac": values["auto"]["policy/no_gradient_frac"],
        "gap": max(abs(loss[0] - loss[1]), abs(norm[0] - norm[1]) / max(norm[0], 1e-9)),
    }


Seconds = tuple[float, float]
"""Processor seconds of the rank that has most, and seconds of all of them together."""


class Watch:
    """Measures what all ranks do between its creation and `end`. Ranks that wait for others take no processor time."""

    def __init__(self) -> None:
        barrier()
        self._start = time.process_time(), time.perf_counter()

    def end(self) -> Seconds:
        own = time.process_time() - self._start[0]
        return max(all_gather_objects(own)), time.perf_counter() - self._start[1]


def summary(draws: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of the draws, and their extremes."""
    found: dict[str, Any] = {}
    for name in ("train", "step", "train_wall", "busiest", "costs"):
        found[name] = {way: round(statistics.median(of[name][way] for of in draws), 3) for way in ("off", "auto")}
        if name in ("train", "step", "train_wall"):
            found[name]["ratio"] = round(statistics.median(of[name]["auto"] / of[name]["off"] for of in draws), 3)
    found["busiest_at_most"] = round(max(of["busiest"]["auto"] for of in draws), 3)
    found["no_gradient_frac"] = round(statistics.fmean(of["no_gradient_frac"] for of in draws), 3)
    return {**found, "gap": float(f"{max(of['gap'] for of in draws):.2g}")}


def on_ranks(ranks: int, workload: str, folder: Path, draws: int, repeats: int) -> dict[str, Any]:
    launcher = [Path(sys.executable).with_name("deepspeed"), "--num_accelerators", ranks, "--no_local_rank"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        launcher += ["--master_port", probe.getsockname()[1]]
    command = [*launcher, __file__, "--folder", folder, "--draws", draws, "--repeats", repeats]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "WORKLOAD": workload}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return summary(json.loads((folder / "draws.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        trainer = build(options.folder)
        measured(trainer, 0, 1)
        draws = [measured(trainer, number, options.repeats) for number in range(1, options.draws + 1)]
        if rank() == 0:
            (options.folder / "draws.json").write_text(json.dumps(draws))
        barrier()
        return
    found: dict[str, Any] = {f"{ranks} x {prompts}": simulated(ranks, prompts) for ranks, prompts in SIMULATED}
    found = {"simulated": found, "ranks": {}}
    with tempfile.TemporaryDirectory() as name:
        folder, tokenizer = Path(name), make_tokenizer()
        make_model(tokenizer, 0, positions=8192).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(0)["train"]))
        for ranks in options.ranks:
            found["ranks"][ranks] = {
                of: on_ranks(ranks, of, folder, options.draws, options.repeats)
                for of in (WORKLOADS if ranks > 1 else ALONE)
            }
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
