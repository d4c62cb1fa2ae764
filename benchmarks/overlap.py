"""What a step would gain if finished groups were trained on while the longest completions are still being decoded.

    python benchmarks/overlap.py --json benchmarks/results/overlap.json

A model of times, not a measurement: with one optimizer step per rollout, the weights do not change until its end, so a
group can be trained on as soon as it is scored, and the result is the same but for rounding. `limit` is the gain if
training cost nothing while anything is decoded. But both run on one GPU. The products of a micro-batch fill it, and the
kernels of a decode step wait for them: `slowdown` is how many times longer a decode step takes meanwhile, `share` how
fast training is then, relative to training alone. The gain is the share of a step's time that is saved:

    step  = rollout + training
    saved = overlapped * (share - (1 - 1 / slowdown)),  where share * overlapped = what is trained during the rollout

On several ranks of ZeRO-3 a micro-batch is a collective: it begins when the slowest rank has finished its group.
Lengths are log-normal, cut at 16 times the median. Times of a decode step are those of its bytes at 80 % of the
memory's bandwidth, and 2.5 microseconds for each of 258 kernels; training takes 6 operations (8 with checkpointing) for
each parameter and token at an MFU of 42 %.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

BANDWIDTH, OPERATIONS, MFU, LAUNCH_S = 0.8 * 4.8e12, 990e12, 0.42, 258 * 2.5e-6


@dataclass(frozen=True)
class Case:
    """A model on H200s, and a rollout of 256 completions a GPU in groups of 16."""

    name: str
    parameters: float
    token_bytes: float
    """Bytes of keys and values of a token."""
    ranks: int
    median: int
    sigma: float
    operations: int = 6
    groups: int = 16
    group_size: int = 16


CASES = [
    Case("1.5b, 1 GPU, 300 tokens", 1.54e9, 28_672, 1, 300, 0.8),
    Case("1.5b, 1 GPU, 2k tokens", 1.54e9, 28_672, 1, 2000, 0.8),
    Case("1.5b, 8 GPUs, 2k tokens", 1.54e9, 28_672, 8, 2000, 0.8),
    Case("7b, 8 GPUs, 300 tokens", 7.6e9, 57_344, 8, 300, 0.8, 8),
    Case("7b, 8 GPUs, 2k tokens", 7.6e9, 57_344, 8, 2000, 0.8, 8),
    Case("7b, 8 GPUs, 2k tokens, wider", 7.6e9, 57_344, 8, 2000, 1.1, 8),
]
INTERFERENCE = [(1.0, 1.0), (1.3, 0.8), (1.5, 0.7), (2.0, 0.6), (3.0, 0.5)]
"""Pairs of `slowdown` and `share`. 258 kernels that wait 20 microseconds each for a place make a step of 2 ms 3.5 times
as long; partitions of the GPU trade one for the other."""


Finished = list[tuple[float, int]]
"""A rank's groups, ascending: when each is finished, and its tokens."""


def rollout(case: Case, rng: random.Random) -> Finished:
    """The groups of one rank. Prompts differ by 0.7 of the whole spread."""
    groups = []
    for _ in range(case.groups):
        hard = rng.gauss(0, 0.7 * case.sigma)
        spread = case.sigma * math.sqrt(1 - 0.7**2)
        lengths = [math.exp(math.log(case.median) + hard + rng.gauss(0, spread)) for _ in range(case.group_size)]
        groups.append([min(max(1, round(length)), 16 * case.median) for length in lengths])
    rows = sorted((n for group in groups for n in group), reverse=True)
    # Seconds until a completion of each length is finished, all being decoded from the beginning.
    at, alive = [0.0], len(rows)
    for token in range(1, rows[0] + 1):
        while alive and rows[alive - 1] < token:
            alive -= 1
        at.append(at[-1] + (2 * case.parameters + alive * token * case.token_bytes) / BANDWIDTH + LAUNCH_S)
    return sorted((at[max(group)], sum(group)) for group in groups)


def gains(case: Case, seeds: int = 5) -> dict[str, float]:
    found: list[dict[str, float]] = []
    for seed in range(seeds):
        rng = random.Random(seed)
        ranks = [rollout(case, rng) for _ in range(case.ranks)]
        end = max(groups[-1][0] for groups in ranks)
        cost = case.operations * case.parameters / (MFU * OPERATIONS)
        training = max(sum(tokens for _, tokens in groups) for groups in ranks) * cost
        numbers = {"rollout_s": end, "training_s": training}
        for slowdown, share in INTERFERENCE:
            overlapped = trained(ranks, end, cost, share) / share
            saved = overlapped * (share - (1 - 1 / slowdown))
            numbers[f"gain at {slowdown}x, {share}"] = max(0.0, saved) / (end + training)
        found.append(numbers)
    return {name: round(sum(numbers[name] for numbers in found) / seeds, 3) for name in found[0]}


def trained(ranks: list[Finished], end: float, cost: float, share: float) -> float:
    """Seconds of training, as it takes alone, that are done before the rollout ends: group after group, each when the
    slowest rank has finished its own."""
    clock, done = 0.0, 0.0
    for groups in zip(*ranks, strict=True):
        clock = max(clock, *(ready for ready, _ in groups))
        part = min(max(tokens for _, tokens in groups) * cost, max(0.0, end - clock) * share)
        clock, done = clock + part / share, done + part
    return done


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {case.name: gains(case) for case in CASES}
    for name, numbers in results.items():
        print(name, json.dumps(numbers))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
