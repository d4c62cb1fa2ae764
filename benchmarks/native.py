"""The CPU kernels of the training pass against torch's own implementation, interleaved, the best of several repeats.

    python benchmarks/native.py [--threads 2] [--repeats 5] [--json FILE]

Attention: forward and backward of prompts with their completions, by native/attention.c and by SDPA over padded
buckets. Head: forward and backward of log-probabilities at V = 151,936, by native/softmax.c and by torch on the same
tiles.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybrid_grpo.model.attention import Options, Segments
from hybrid_grpo.model.kernels import build as kernels
from hybrid_grpo.model.logprobs import token_logprobs

# Prompts, tokens of each, completions per prompt, tokens of each, query heads, key heads, head size.
CASES = [
    (32, 7, 8, 6, 4, 2, 32),
    (16, 16, 8, 60, 4, 2, 64),
    (4, 64, 8, 256, 4, 2, 64),
    (2, 512, 8, 64, 4, 2, 64),
    (1, 16, 2, 2048, 14, 2, 64),
    (1, 128, 4, 512, 16, 8, 128),
]
HEAD = {"tokens": 7680, "hidden": 256, "vocabulary": 151_936}


def attention(prompts: int, prompt: int, size: int, length: int, heads: int, kv: int, d: int) -> Callable[[], Any]:
    """A forward that can be called repeatedly."""
    own, prefix, tokens = [], [], 0
    for _ in range(prompts):
        own += [(tokens, prompt), *((tokens + prompt + k * length, length) for k in range(size))]
        prefix += [(0, 0), *[(tokens, prompt)] * size]
        tokens += prompt + size * length
    segments = Segments(own, prefix, torch.device("cpu"))
    query, key, value = (torch.randn(1, tokens, n, d).transpose(1, 2).requires_grad_() for n in (heads, kv, kv))
    return lambda: segments.attend(query, key, value, Options(d**-0.5)).sum()


def head(tokens: int, hidden: int, vocabulary: int) -> Callable[[], Any]:
    """The same for log-probabilities."""
    states, weight = torch.randn(tokens, hidden).requires_grad_(), (0.1 * torch.randn(vocabulary, hidden))
    weight.requires_grad_()
    target = torch.randint(vocabulary, (tokens,))
    return lambda: token_logprobs(states, weight, None, target)[0].sum()


def measure(forward: Callable[[], Any], repeats: int) -> dict[str, list[float]]:
    """Seconds of forward and backward by `kernel` and by `torch`."""
    load = kernels.load
    seconds: dict[str, list[tuple[float, float]]] = {"kernel": [], "torch": []}
    for _ in range(repeats + 1):
        for by, runs in seconds.items():
            kernels.load = load if by == "kernel" else lambda: None  # type: ignore[assignment]
            start = time.perf_counter()
            loss = forward()
            middle = time.perf_counter()
            loss.backward()
            runs.append((middle - start, time.perf_counter() - middle))
    kernels.load = load
    # The first call of each finds cold caches.
    return {by: [min(part) for part in zip(*runs[1:], strict=True)] for by, runs in seconds.items()}


def main() -> None:
    """Measure, print, and write FILE."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    results = {}
    for case in CASES:
        prompts, prompt, size, length, heads, kv, d = case
        name = f"attention: {prompts} of {prompt} x {size} of {length}, {heads}/{kv} heads of {d}"
        results[name] = measure(attention(*case), arguments.repeats)
        print(name, {by: f"{1e3 * f:.1f} + {1e3 * b:.1f} ms" for by, (f, b) in results[name].items()}, flush=True)
    name = "head: {tokens} tokens, D = {hidden}, V = {vocabulary}".format(**HEAD)
    results[name] = measure(head(**HEAD), 1)
    print(name, {by: f"{f:.1f} + {b:.1f} s" for by, (f, b) in results[name].items()}, flush=True)
    if arguments.json:
        machine = {"threads": arguments.threads, "torch": torch.__version__}
        arguments.json.write_text(json.dumps({"machine": machine, "seconds": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
