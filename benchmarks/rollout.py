"""Rollout engines compared on the same weights, prompts and forced lengths, in one run, interleaved.

    python benchmarks/rollout.py --workload ragged --engines hybrid,generate --repeats 5 --json FILE

Every engine has its own process for every workload, which sleeps between its turns; each repeat goes once through all
workloads and engines. With `--alone` engines are measured one after the other, each with all memory. Only decoding is
timed, from token ids of prompts to completions. The warm-up is a whole run of the same workload, since only that
captures the CUDA graphs for the timed sampling settings, batch sizes and cache. Peak memory is that of the engine's
whole process during its run; on a GPU, what torch allocated there. A workload's results replace its earlier results in
FILE (under names such as `gpu_ragged/1.5b` for the larger models); other workloads in FILE stay. Run nothing else on
the machine: with another program on the same cores, threads that wait for each other become ten times slower, and not
equally in all engines.

The entry of `hybrid` also shows how close decoding comes to the limit of memory bandwidth: `floor_s` is the time to
read the weights at every step and the cache entries of every row, at the bandwidth that reading memory has.
`floor_fraction` is this divided by the decoding time, which is the time of the run minus that of one with single-token
completions.
"""

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from machine import chosen, machine, parser_of, save
from rollout_workloads import MAIN, WORKLOADS, Workload

ENGINES = ("hybrid", "generate", "generate_batch")


def reset_peak() -> None:
    """Reset the peak of this process's memory to its present size, if Linux allows it."""
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def memory_gb(field: str) -> float:
    """Resident memory in GB, now (`VmRSS`) or its peak since `reset_peak` (`VmHWM`)."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024 / 1e9


def serve(name: str, shape: str, threads: int, pipe: Connection) -> None:
    """A worker: builds the engine, then runs each workload received through the pipe, until it receives None."""
    import torch
    from rollout_engines import BUILDERS, Hybrid, bandwidth_floor

    torch.set_num_threads(threads)
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    engine = BUILDERS[name](shape, device)
    pipe.send(torch.cuda.get_device_name() if on_gpu else "cpu")
    while (workload := pipe.recv()) is not None:
        reset_peak()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with engine(workload) as decode:
            start = time.perf_counter()
            produced = decode()
            if on_gpu:
                torch.cuda.synchronize()
            run: dict[str, float] = {"seconds": time.perf_counter() - start, "peak_rss_gb": memory_gb("VmHWM")}
        wanted = [n for _, n in workload.rows]
        assert produced == wanted, "completions do not have the lengths forced"
        if on_gpu:
            run["peak_gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
            # Free unused memory for the other processes.
            torch.cuda.empty_cache()
        if isinstance(engine, Hybrid):
            run["floor_s"] = bandwidth_floor(engine)
        pipe.send(run)


class Worker:
    """The parent's side of an engine's process."""

    def __init__(self, name: str, shape: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(name, shape, threads, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        """The device once the engine is built, then the measurements of each run."""
        try:
            return self.pipe.recv()
        except EOFError:
            sys.exit(f"engine {self.name} stopped: its error stands above")

    def run(self, workload: Workload) -> dict[str, float]:
        self.pipe.send(workload)
        return self.answer()

    def stop(self) -> None:
        self.pipe.send(None)
        self.process.join()


def summary(workload: Workload, runs: list[dict[str, float]]) -> dict[str, Any]:
    """An engine's results on a workload, from its repeats."""
    times = [run["seconds"] for run in runs]
    tokens = sum(n for _, n in workload.rows)
    return {
        "median_s": median(times), "min_s": min(times), "max_s": max(times), "tokens": tokens,
        "tokens_per_s": tokens / median(times), "peak_rss_gb": max(run["peak_rss_gb"] for run in runs),
        **({"peak_gpu_gb": max(run["peak_gpu_gb"] for run in runs)} if "peak_gpu_gb" in runs[0] else {}),
        "times_s": times,
    }  # fmt: skip


def measure(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, dict[str, dict[str, Any]]]]]:
    """Yields the device and the engines' results by workload, again after each group of workloads."""
    workloads = {name: WORKLOADS[name]() for name in arguments.workload}
    pairs = [(name, engine) for name in workloads for engine in arguments.engines]
    results: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in workloads}
    for together in [[pair] for pair in pairs] if arguments.alone else [pairs]:
        workers = {pair: Worker(pair[1], arguments.model, arguments.threads) for pair in together}
        device = next(iter([worker.answer() for worker in workers.values()]))
        runs: dict[tuple[str, str], list[dict[str, float]]] = {pair: [] for pair in together}
        for repeat in range(1 + arguments.repeats):
            for pair, worker in workers.items():
                run = worker.run(workloads[pair[0]])
                if repeat:  # the first warms up
                    runs[pair].append(run)
        for (name, engine), worker in workers.items():
            result = results[name][engine] = summary(workloads[name], runs[name, engine])
            if "floor_s" in runs[name, engine][0]:
                result["floor_s"] = median(run["floor_s"] for run in runs[name, engine])
                # The first of these may capture graphs for another completion length.
                single = workloads[name].shortened(workloads[name].limit)
                result["prefill_s"] = min(worker.run(single)["seconds"] for _ in range(3))
                result["floor_fraction"] = result["floor_s"] / (result["median_s"] - result["prefill_s"])
            worker.stop()
        yield device, results


def show(title: str, results: dict[str, dict[str, Any]]) -> None:
    """The table of one workload; `times` is the median over that of hybrid."""
    print(f"\n{title}: {next(iter(results.values()))['tokens']} tokens")
    print(f"{'engine':16}{'median s':>10}{'min s':>10}{'max s':>10}{'tokens/s':>10}{'peak GB':>9}{'times':>8}")
    ours = results.get("hybrid", {}).get("median_s")
    for engine, r in results.items():
        times = f"{r['median_s'] / ours:8.2f}" if ours else f"{'':8}"
        row = f"{engine:16}{r['median_s']:10.3f}{r['min_s']:10.3f}{r['max_s']:10.3f}{r['tokens_per_s']:10.0f}"
        floor = f"   {r['floor_fraction']:.0%} of the bandwidth floor" if "floor_fraction" in r else ""
        print(f"{row}{r['peak_rss_gb']:9.2f}{times}{floor}", flush=True)


def merge(file: Path, of_machine: dict[str, Any], title: str, results: dict[str, dict[str, Any]]) -> None:
    """Write one workload's results into a file, whose results must all be of one machine."""
    known = json.loads(file.read_text()) if file.exists() else {"machine": of_machine, "workloads": {}}
    if known["machine"] != of_machine:
        sys.exit(f"--json {file} holds results of another machine or other versions: name a new file")
    workloads = {**known["workloads"], title: results}
    command = " ".join(["python", *sys.argv])
    file.parent.mkdir(parents=True, exist_ok=True)
    save(file, {"machine": of_machine, "command": command, "workloads": workloads})


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--workload", default="ragged", help=f"`all` ({', '.join(MAIN)}), or of {', '.join(WORKLOADS)}")
    parser.add_argument("--engines", default=",".join(ENGINES), help="separated by commas")
    parser.add_argument("--repeats", type=int, default=5)
    shapes = ("tiny", "tiny-qwen3.5", "0.5b", "1.5b", "7b", "qwen3-0.6b")
    parser.add_argument("--model", choices=shapes, default="tiny", help="shape of the weights")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every engine")
    parser.add_argument("--alone", action="store_true", help="one engine after the other instead of interleaved")
    arguments = parser.parse_args()
    of_all = ",".join(MAIN) if arguments.workload == "all" else arguments.workload
    arguments.workload = chosen(parser, "workload", of_all, WORKLOADS)
    arguments.engines = chosen(parser, "engines", arguments.engines, ENGINES)
    return arguments


def main() -> None:
    arguments = parse()
    # Also for threads beyond torch.set_num_threads: those that an engine starts itself.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    for device, results in measure(arguments):
        for name, of_engines in results.items():
            title = name if arguments.model == "tiny" else f"{name}/{arguments.model}"
            if of_engines:
                show(title, of_engines)
            if of_engines and arguments.json:
                merge(arguments.json, machine(threads=arguments.threads, device=device), title, of_engines)


if __name__ == "__main__":
    main()
