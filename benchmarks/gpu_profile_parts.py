"""The parts of gpu_profile.py, which says what each measures. A part writes to `found` as it goes."""

import sys
import time
from collections import deque
from collections.abc import Callable
from importlib import metadata
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from gpu_bench import Bench, Found
from gpu_checks import micro_batch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hybrid_grpo.commands.plan import known_config
from hybrid_grpo.commands.tune import Layer, milliseconds, tuned
from hybrid_grpo.config import LoraConfig
from hybrid_grpo.distributed.hardware import peak_flops
from hybrid_grpo.generation import Sampling
from hybrid_grpo.generation.paged_attention import Prefill
from hybrid_grpo.generation.sequence import Sequence
from hybrid_grpo.model.flops import Cost
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.lora import Adapters
from hybrid_grpo.model.ragged_attention import varlen_takes
from hybrid_grpo.model.routing import recomputed

LONGEST = 15
"""Kernels that are listed."""


def versions(bench: Bench, found: Found) -> None:
    found["python"] = sys.version.split()[0]
    for name in ("torch", "triton", "transformers", "numpy", "flash-attn", "deepspeed"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    if bench.device.type == "cuda":
        gpu_ = torch.cuda.get_device_properties(bench.device)
        found |= {"gpu": gpu_.name, "sm": f"{gpu_.major}{gpu_.minor}", "processors": gpu_.multi_processor_count}
        found |= {"gpu_gb": gpu_.total_memory / 1e9, "free_gb": torch.cuda.mem_get_info()[0] / 1e9}
        found["cuda_of_torch"] = torch.version.cuda
    found["product_tflops"] = bench.hardware.flops / 1e12
    found["read_gb_per_s"] = bench.hardware.bandwidth / 1e9
    found["varlen_attn"] = {name: varlen_takes(name) for name in ("enable_gqa", "seqused_k", "block_table")}


def model(bench: Bench, found: Found) -> None:
    found["parameters"] = sum(p.numel() for p in bench.model.parameters())
    with torch.inference_mode():
        found["cache_bytes_per_token"] = bench.geometry.token_bytes
        found["prefill_bytes_per_token"] = bench.geometry.reading


@torch.inference_mode()
def capturing(bench: Bench, found: Found) -> None:
    _ = bench.cache
    for name in ("first", "again"):
        bench.__dict__.pop("decoder", None)
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()  # as a capture does
        free = torch.cuda.mem_get_info()[0] if bench.device.type == "cuda" else 0
        start = time.perf_counter()
        decoder = bench.decoder
        bench.synchronize()
        made = time.perf_counter()
        decoder.capture_all()
        bench.synchronize()
        row = {"decoder_s": made - start, "capturing_s": time.perf_counter() - made, "forwards": decoder.captures}
        left = torch.cuda.mem_get_info()[0] if bench.device.type == "cuda" else 0
        found[name] = row | {"choices": len(decoder._chosen), "memory_mib": (free - left) >> 20}
        found["usable"] = decoder.captured
        del decoder


def _steps(bench: Bench, rows: int, context: int, *, uneven: bool = False) -> Callable[[int], None]:
    """Put sequences with random entries into the slots, `context` of them on average over the steps of `decode` that
    count, or from few to twice as many; returns what advances them, reading outcomes as late as a rollout does."""
    decoder, steps = bench.decoder, 5 * bench.sizes.steps // 2
    lengths = [max(steps, 2 * context * (row + 1) // (rows + 1)) if uneven else context for row in range(rows)]
    ends = accumulate((bench.width(length) for length in lengths), initial=1)
    pages = [list(range(*pair)) for pair in pairwise(ends)]
    places = enumerate(zip(pages, lengths, strict=True))
    active = [Sequence(0, row, row, [row + 1], 1, 1 << 30, pages=own, position=n - steps) for row, (own, n) in places]
    decoder.begin(Sampling(1))
    decoder.insert(0, active)

    def advance(count: int) -> None:
        pending: deque[Any] = deque()
        for _ in range(count):
            pending.append(decoder.step(active))
            for sequence in active:
                sequence.position += 1
            if len(pending) > decoder.max_in_flight:
                decoder.read(pending.popleft())
        while pending:
            decoder.read(pending.popleft())

    return advance


@torch.inference_mode()
def decode(bench: Bench, found: Found) -> None:
    weights = sum(p.nbytes for p in bench.view.parameters())
    for context in bench.sizes.contexts:
        for rows in bench.sizes.rows:
            cached = rows * context * bench.geometry.token_bytes
            if bench.pages(rows, context) > bench.cache.pages:
                found[f"{rows} x {context}"] = f"skipped: {cached / 1e9:,.1f} GB of keys and values do not fit"
                continue
            advance, steps = _steps(bench, rows, context), bench.sizes.steps
            seconds = bench.seconds(lambda: advance(steps), 3) / steps  # noqa: B023
            floor = (weights + cached) / bench.hardware.bandwidth
            found[f"{rows} x {context}"] = {
                "ms": 1e3 * seconds,
                "floor_ms": 1e3 * floor,
                "tokens_per_s": rows / seconds,
            }
            fits = 2 * context <= max(bench.sizes.contexts) and bench.pages(rows, 2 * context) <= bench.cache.pages
            if fits and rows > 1:
                advance = _steps(bench, rows, context, uneven=True)
                seconds = bench.seconds(lambda: advance(steps), 3) / steps  # noqa: B023
                found[f"{rows} x {context}, from few to twice as many"] = {"ms": 1e3 * seconds, "floor_ms": 1e3 * floor}


@torch.inference_mode()
def products(bench: Bench, found: Found) -> None:
    """A step whose products are the kernel's, one whose are torch's, and one with weights in eight bits."""
    for by, most_rows in (("the kernel", 1 << 30), ("torch", 0), ("eight bits", 0)):
        if by == "eight bits":
            bench.weights = "int8"
            bench.release()
        bench.__dict__.pop("decoder", None)
        if bench.decoder._fused is not None:
            bench.decoder._fused.most_rows = most_rows
        for rows in bench.sizes.rows:
            advance, steps = _steps(bench, rows, bench.sizes.contexts[0]), bench.sizes.steps
            found[f"ms of {rows} rows, by {by}"] = 1e3 * bench.seconds(lambda: advance(steps), 3) / steps  # noqa: B023
    bench.weights = "merged"
    bench.release()


@torch.inference_mode()
def tune(bench: Bench, found: Found) -> None:
    if bench.device.type == "cuda":
        units = torch.cuda.get_device_properties(bench.device).multi_processor_count
        layer, measure = Layer(bench.device), milliseconds
    else:  # tests/commands/test_tune.py runs the kernels
        layer, units, measure = Layer(bench.device, 256, 64, 4096), 4, lambda _: 0.0
    found |= tuned(layer, units, measure)._asdict()


def _longest(bench: Bench, work: Callable[[], Any], runs: int) -> tuple[dict[str, float], list[Found]]:
    """Milliseconds in which the device was busy and that passed, and the longest kernels, all of them per run."""
    on_gpu = bench.device.type == "cuda"
    work()
    bench.synchronize()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        start = time.perf_counter()
        for _ in range(runs):
            work()
        bench.synchronize()
        passed = time.perf_counter() - start
    what = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    # Calls of CUDA's runtime are events of the host.
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in seen.key_averages() if event.device_type == kind]
    events.sort(key=lambda event: -getattr(event, what))
    total = sum(getattr(event, what) for event in events)
    kernels = [
        {
            "ms": getattr(event, what) / 1e3 / runs,
            "share": getattr(event, what) / max(total, 1),
            "calls": event.count / runs,
            "name": event.key[:90],
        }
        for event in events[:LONGEST]
    ]
    launches = sum(event.count for event in events) / runs
    return {"busy_ms": total / 1e3 / runs, "passed_ms": 1e3 * passed / runs, "launches": launches}, kernels


@torch.inference_mode()
def decode_kernels(bench: Bench, found: Found) -> None:
    for rows, context in bench.sizes.profiled:
        if bench.pages(rows, context) <= bench.cache.pages:
            advance, name = _steps(bench, rows, context), f"{rows} x {context}"
            found[name], found[f"kernels of {name}"] = _longest(bench, lambda: advance(1), bench.sizes.steps)  # noqa: B023


@torch.inference_mode()
def prefill(bench: Bench, found: Found) -> None:
    for count, before, new in bench.sizes.prefills:
        width = bench.width(before + new)
        name = f"{count} x {new}" + (f" after {before}" if before else "")
        if bench.pages(count, before + new) > bench.cache.pages:
            found[name] = "skipped: the keys and values do not fit"
            continue
        pages = [list(range(1 + row * width, 1 + (row + 1) * width)) for row in range(count)]
        ids = torch.arange(count * new, device=bench.device)[None] % bench.config.vocab_size

        def read() -> None:
            batch = Prefill(bench.cache, pages, [before] * count, [new] * count)  # noqa: B023
            batch.read(bench.view.base_model, ids, batch.position_1N)  # noqa: B023

        seconds = bench.seconds(read, 3)
        found[name] = {"ms": 1e3 * seconds, "tokens_per_s": count * new / seconds}


def _micro_batch(
    bench: Bench, checkpointing: bool = True, model: Any = None, sizes: tuple[int, int, int] | None = None,
    update: Callable[[], object] = lambda: None,
) -> tuple[Callable[[], None], float, int]:  # fmt: skip
    """What runs forward and backward of a prompt and its completions, and an `update`; floating-point operations, and
    tokens."""
    model, (prompt, count, length) = model or bench.model, sizes or bench.sizes.micro_batch
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": recomputed})
    else:
        model.activation_checkpointing_disable()
    scored, given = LogprobModel(model).train(), micro_batch(bench.device, prompt, count, length)

    def work() -> None:
        logp_N, _ = scored(*given, (), 1.0)
        (-logp_N.mean()).backward()
        update()
        scored.zero_grad(set_to_none=True)

    context = np.array([prompt / 2, prompt + length / 2])
    tokens = np.array([prompt, count * length])
    flops = Cost.of(model).training(tokens, context, np.array([0, count * length])).sum()
    return work, float(flops), prompt + count * length


def _trained(bench: Bench, work: Callable[[], None], flops: float, tokens: int, repeats: int) -> Found | str:
    on_gpu = bench.device.type == "cuda"
    known = peak_flops(torch.cuda.get_device_name(bench.device)) if on_gpu else None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        seconds = bench.seconds(work, repeats if on_gpu else 1)
    except torch.OutOfMemoryError:
        return "the activations do not fit"
    row = {"tokens": tokens, "ms": 1e3 * seconds, "tokens_per_s": tokens / seconds, "tflops": flops / seconds / 1e12}
    row["mfu"] = flops / seconds / (known or bench.hardware.flops)  # of the data sheet, else of a measured product
    return row | {"peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else "not measured on a CPU"}


def training(bench: Bench, found: Found) -> None:
    bench.release()
    for name, checkpointing in (("checkpointing", True), ("no checkpointing", False)):
        found[name] = _trained(bench, *_micro_batch(bench, checkpointing), 5)


def peers(bench: Bench, found: Found) -> None:
    bench.release("model")
    for name, tokens, rank, published in bench.sizes.peers:
        model = bench.made(known_config(name) or bench.config)
        if rank:
            Adapters(model, LoraConfig(rank=rank), seed=0)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
        sizes = tokens // 32, 1, tokens - tokens // 32
        row = _trained(bench, *_micro_batch(bench, True, model, sizes, optimizer.step), 2)
        if not isinstance(row, str):
            row["times_published"] = row["tokens_per_s"] / published
        found[f"{name or 'toy'}, {tokens} tokens" + f", rank {rank}" * bool(rank)] = row
        del model, optimizer
        bench.release()


def training_kernels(bench: Bench, found: Found) -> None:
    bench.release()
    found["all"], found["kernels"] = _longest(bench, _micro_batch(bench)[0], 1)
