"""Times of a layer's decode attention on a GPU, by the tiling of the kernel and by the programs that share a sequence,
and of sampling by its blocks: what the constants of kernels/gpu/attention.py and sampling.py were chosen from.

    python benchmarks/gpu_attention.py [--json benchmarks/results/gpu_attention.json]
    python benchmarks/gpu_attention.py --toy        # on the CPU, interpreted: shows that it runs

Milliseconds are medians of three replays of a CUDA graph. Each tiling is compared with the first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

if "--toy" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton decides when it is imported

from hybrid_grpo.model.kernels.gpu import attention, launcher, sampling

PAGE = 32
SHAPES = {"1.5b": (12, 2, 128), "0.5b": (14, 2, 64), "8b": (32, 8, 128)}
"""Heads, key heads, and numbers of a head."""
CASES = {
    **{"256 x 1k": ("1.5b", 256, 1024), "256 x 64 to 2k": ("1.5b", 256, -2048), "8 x 32k": ("1.5b", 8, 32_768)},
    **{"64 x 8k": ("1.5b", 64, 8192), "1 x 32k": ("1.5b", 1, 32_768), "8 x 1k": ("1.5b", 8, 1024)},
    **{"1 x 8k": ("1.5b", 1, 8192), "8 x 8k": ("1.5b", 8, 8192)},
    **{"0.5b, 256 x 1k": ("0.5b", 256, 1024), "8b, 64 x 4k": ("8b", 64, 4096), "8b, 256 x 1k": ("8b", 256, 1024)},
}
"""Shape, rows, and entries of each; a negative number: evenly from 64 to so many."""
TILINGS = ((64, 4, 2), (64, 4, 5), (32, 4, 5), (32, 2, 5), (128, 4, 5), (64, 8, 5))
"""Entries, warps and stages."""
PROGRAMS = (1, 2, 4, 8, 16, 32, 64)
NUMBERS = (0, attention._PARTS)
"""Numbers of parts that are added up at once; 0: one part after the other, as always with one tile on its way."""
BLOCKS = ((4096, 16), (4096, 8), (8192, 16), (2048, 16))
"""Columns and warps of sampling."""


def milliseconds(work: Callable[[], Any], on_gpu: bool, calls: int = 8) -> float:
    """The time of a call."""
    work()
    if not on_gpu:
        return 0.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    times = []
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return median(times[1:])


def attentions(device: torch.device, cases: dict[str, tuple[str, int, int]]) -> dict[str, Any]:
    """For each case the bytes that are read, and rows of a tiling, its programs and milliseconds."""
    on_gpu, found = device.type == "cuda", dict[str, Any]()
    attention._UNITS = 1 << 15  # room for all combinations
    half = torch.bfloat16 if on_gpu else torch.float16  # Triton's interpreter cannot multiply bfloat16
    for name, (shape, rows, entries) in cases.items():
        heads, kv, d = SHAPES[shape]
        width, many = -(-abs(entries) // PAGE), abs(entries)
        lengths = torch.full((rows,), many) if entries > 0 else torch.linspace(64, many, rows).long()
        lengths = lengths[torch.randperm(rows)].to(device)
        pools = [torch.randn(rows * width, PAGE, kv, d, dtype=half, device=device) for _ in range(2)]
        table = torch.randperm(rows * width).int().view(rows, width).to(device)
        query = torch.randn(rows, heads, d, dtype=half, device=device)
        given, first, table_of = (query, *pools, table, lengths - 1, d**-0.5, 0, 0.0, None), None, []
        for (entries_, warps, stages), programs, numbers in itertools.product(TILINGS, PROGRAMS, NUMBERS):
            may = programs > 1 and stages == attention._DEEP
            if programs * rows * kv > 4096 or programs * entries_ > many or (numbers and not may):
                continue
            attention._PARTS = numbers
            attention.launch = lambda *of, warps=warps, **named: launcher.launch(*of, **{**named, "num_warps": warps})
            attention._tiling = lambda *_, entries=entries_, stages=stages: (entries, stages)
            scratch: dict[int, Any] = {}

            def call(programs: int = programs, scratch: dict[int, Any] = scratch, given: Any = given) -> torch.Tensor:
                return attention.paged_attention(*given, scratch, splits=programs, least=1)

            out = call().float()
            first = out if first is None else first
            assert (out - first).norm() < 0.01 * first.norm(), (name, entries_, warps, stages, programs)
            table_of.append([entries_, warps, stages, programs, numbers, milliseconds(call, on_gpu)])
        found[name] = {"bytes": int(lengths.sum()) * kv * d * 4, "tilings": sorted(table_of, key=lambda row: row[-1])}
        print(f"{name}:", *(f"{row}" for row in found[name]["tilings"][:4]), flush=True)
    return found


def samplings(device: torch.device, rows: tuple[int, ...], vocabulary: int) -> list[dict[str, Any]]:
    """Milliseconds by rows for each pair of columns and warps; the tokens are the same."""
    found, tokens = [], dict[int, torch.Tensor]()
    for block, warps in BLOCKS:
        sampling._BLOCK = block
        sampling.launch = lambda *of, warps=warps, **named: launcher.launch(*of, **{**named, "num_warps": warps})
        times = {}
        for n in rows:
            torch.manual_seed(0)
            logits = torch.randn(n, vocabulary, device=device).bfloat16()
            numbers = torch.arange(n, device=device), torch.zeros(n, dtype=torch.int64, device=device)
            given = logits, *numbers, 1.0, 0, 1 << 23, 0, False, False
            token = sampling.sample(*given)[0]
            assert torch.equal(tokens.setdefault(n, token), token)
            times[n] = milliseconds(lambda given=given: sampling.sample(*given), device.type == "cuda")  # type: ignore[misc]
        found.append({"block": block, "warps": warps, "ms by rows": times})
        print("sampling:", found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="one small case on the CPU, without times")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device("cpu" if given.toy else "cuda")
    torch.manual_seed(0)
    found = {
        "machine": "cpu, toy" if given.toy else torch.cuda.get_device_name(),
        "attention": attentions(device, {"toy": ("0.5b", 2, -100)} if given.toy else CASES),
        "sampling": samplings(device, *(((2,), 5000) if given.toy else ((256, 64, 8, 1), 151_936))),
    }
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
