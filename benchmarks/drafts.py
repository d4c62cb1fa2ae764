"""Drafts: that they change no token, and what they gain.

    python benchmarks/drafts.py --json benchmarks/results/drafts.json [--model FOLDER] [--only equal,speed]

`equal` completes prompts with drafts of which four tokens of five are right, and without: random prompts, samplings,
slots and page sizes, answers of tools, and caches so small that sequences are preempted, over architectures with the C
kernels and without. Counted are completions whose tokens, ends or supports differ, and the largest difference of a
log-probability.

`speed` trains a small model (once, into FOLDER) on two kinds of text that repeat: `copy`, eight letters again and
again, and `countdown`, attempts to reach a number, in which the same numbers and intermediate results come back. It
then times the workload `tail` of rollout.py with prompts of each kind: without drafts and with, in turn. `random` are
the prompts of that workload and an untrained model, where nothing repeats. Lengths of completions are forced.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rollout_workloads import WORKLOADS, Workload
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_grpo.generation import Drafter, Request, Sampling, generate, stream_key
from hybrid_grpo.generation import loop as loops
from hybrid_grpo.generation.state_pool import rows_for
from hybrid_grpo.model.attention import ATTENTION

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

KINDS = ("copy", "countdown")
DIGITS, PLUS, MINUS, IS, END, FROM = range(64, 74), 74, 75, 76, 77, 78


def copy(rng: random.Random, length: int) -> list[int]:
    """Eight letters again and again. How many there are is not left to the model to find, which takes far longer."""
    return ([rng.randrange(64) for _ in range(8)] * (1 + length // 8))[:length]


def countdown(rng: random.Random, length: int) -> list[int]:
    """Numbers, then sums and differences of two of them and of earlier results, until the text is long enough."""

    def digits(number: int) -> list[int]:
        return [DIGITS[int(digit)] for digit in str(number)]

    numbers = [rng.randrange(1, 100) for _ in range(4)]
    text = [FROM, *(token for number in numbers for token in [*digits(number), END])]
    while len(text) < length:
        total = numbers[0]
        for number in rng.sample(numbers[1:], 3):
            plus = rng.random() < 0.5 or total < number
            before, total = total, total + number if plus else total - number
            text += [*digits(before), PLUS if plus else MINUS, *digits(number), IS, *digits(total), END]
    return text[:length]


def trained(folder: Path, steps: int) -> None:
    """Train the small model on both kinds of text, at positions up to those of `tail`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, initializer_range=0.04,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    adam = torch.optim.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.01)
    rng, length = random.Random(0), 96
    for step in range(steps):
        for group in adam.param_groups:
            group["lr"] = 1.5e-3 * min(1.0, (step + 1) / 50, (steps - step) / (steps / 3))
        ids = torch.tensor([(copy, countdown)[row % 2](rng, length) for row in range(16)])
        begins = torch.randint(0, 1024, (len(ids), 1))
        logits = model(ids, position_ids=begins + torch.arange(length)).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"warm-up step {step}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)


def timed(model: Any, workload: Workload, drafters: Sequence[Drafter | None], repeats: int) -> list[dict[str, Any]]:
    """Seconds of the workload by each of `drafters`, in turn, and what came of the last repeat."""
    keys = iter(range(len(workload.rows)))
    requests = [
        Request(ids, keys=[next(keys) for _ in lengths], limits=lengths)
        for ids, lengths in zip(workload.prompts, workload.lengths, strict=True)
    ]
    seconds: list[list[float]] = [[] for _ in drafters]
    stats: list[Any] = [None for _ in drafters]
    for repeat in range(repeats + 1):
        found = []
        # In turn from both ends, since the first of a repeat is a little faster, whatever it is.
        for number, drafter in list(enumerate(drafters))[:: 1 if repeat % 2 else -1]:
            start = time.perf_counter()
            groups, stats[number] = generate(
                model, requests, Sampling(workload.limit), max_slots=workload.slots, drafter=drafter
            )
            seconds[number].append(time.perf_counter() - start)
            found.append(groups)
        assert all(groups == found[0] for groups in found), "drafts change nothing"
    return [
        {
            "seconds": round(statistics.median(times[1:]), 3), "fastest": round(min(times[1:]), 3), "steps": s.steps,
            "drafted": s.drafted, "held": s.held, "tokens": sum(n for _, n in workload.rows),
        }
        for times, s in zip(seconds, stats, strict=True)
    ]  # fmt: skip


def speed(folder: Path, steps: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if not (folder / "config.json").exists():
        trained(folder, steps)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION, dtype=torch.float32).eval()
    tail, results = WORKLOADS["tail"](), dict[str, Any]()
    rng = random.Random(1)
    prompts = {kind: [globals()[kind](rng, len(ids)) for ids in tail.prompts] for kind in KINDS}
    for kind, of_kind in (*prompts.items(), ("random", tail.prompts)):
        if kind == "random":
            model = AutoModelForCausalLM.from_config(model.config, attn_implementation=ATTENTION).eval()
        plain, drafts = timed(model, replace(tail, prompts=of_kind), [None, Drafter()], repeats)
        ratio = round(plain["seconds"] / drafts["seconds"], 3)
        results[kind] = {"without": plain, "with": drafts, "ratio": ratio}
        print(kind, json.dumps(results[kind]), flush=True)
    return results


def equal(rollouts: int) -> dict[str, Any]:
    """Compare rollouts of five prompts with drafts and without."""
    from knowing_drafter import Knowing
    from scripted_turns import Scripted
    from tiny_models import ARCHITECTURES, MORE_ATTENTION, VOCABULARY, build, tiny_config

    torch.set_num_threads(1)
    architectures = [*ARCHITECTURES, *MORE_ATTENTION, "qwen3_5_text"]
    models = {name: build(tiny_config(name), ATTENTION) for name in architectures}
    results: dict[str, Any] = {}
    for number in range(rollouts):
        rng = random.Random(number)
        name = architectures[number % len(architectures)]
        sampling = random_sampling(rng, VOCABULARY)
        slots, loops.PAGE = rng.randint(2, 12), rng.choice([4, 8, 32])
        kind = ("plain", "turns", "preempted")[number // len(architectures) % 3]
        given: dict[str, Callable[[], Any]] = {}
        if kind == "turns":
            given["turns"] = lambda: Scripted(4, (0, 3, 8))
        if kind == "preempted":
            loops.PAGE = 4
            geometry = loops._prepared(models[name])
            cache_gb = (30 * 4 * geometry.token_bytes + rows_for(slots, waiting=False) * geometry.state_bytes) / 2**30
            given["cache_gb"] = lambda cache_gb=cache_gb: cache_gb
        requests = [
            Request(
                [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))],
                [stream_key(number, row, k) for k in range(3)],
                most=100 if kind == "turns" else None,
            )
            for row in range(5)
        ]

        def complete(drafter: Drafter | None = None, these: Any = (name, requests, sampling, slots, given)) -> Any:
            name, requests, sampling, slots, given = these
            more = {key: make() for key, make in given.items()}
            return generate(models[name], requests, sampling, max_slots=slots, decode=as_text, drafter=drafter, **more)

        plain, _ = complete()
        found, stats = complete(Knowing(plain, number))
        of = results.setdefault(name, {}).setdefault(
            kind, {"completions": 0, "other": 0, "largest_gap": 0.0, "drafted": 0, "held": 0}
        )
        of["drafted"] += stats.drafted
        of["held"] += stats.held
        for mine, theirs in zip((c for g in found for c in g), (c for g in plain for c in g), strict=True):
            of["completions"] += 1
            same = (mine.token_ids, mine.finish, mine.given) == (theirs.token_ids, theirs.finish, theirs.given)
            of["other"] += not (same and mine.support == theirs.support)
            if same:
                gaps = [abs(a - b) for a, b in zip(mine.logp, theirs.logp, strict=True)]
                of["largest_gap"] = max(of["largest_gap"], *gaps)
    return results


def as_text(token_ids: list[int]) -> str:
    return "".join(chr(97 + token % 3) for token in token_ids)


def random_sampling(rng: random.Random, vocabulary: int) -> Sampling:
    filters = rng.choice([{}, {"top_k": rng.randint(2, 20)}, {"top_p": 0.9}, {"min_p": 0.05}])
    ends = rng.choice([{}, {"stop_ids": tuple(range(0, vocabulary, 9))}, {"stop_strings": ("ab",)}])
    return Sampling(
        24,
        temperature=rng.choice([0.0, 0.7, 1.0, 1.3]),
        min_tokens=rng.choice([0, 3]),
        logprobs=rng.choice(["softmax", "sampling", *(["mask"] if filters else [])]),
        **filters,
        **ends,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, default=Path("runs/drafts-model"))
    parser.add_argument("--only", default="equal,speed")
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    if "speed" in args.only:
        results["speed"] = speed(args.model, args.steps, args.repeats)
    if "equal" in args.only:
        results["equal"] = equal(args.rollouts)
        every = [of for kinds in results["equal"].values() for of in kinds.values()]
        print({name: sum(of[name] for of in every) for name in ("completions", "other", "drafted", "held")})
        print("largest gap", max(of["largest_gap"] for of in every))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
