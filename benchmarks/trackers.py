"""What logging costs a step at the quickstart's size: everything that a run writes, and wandb beside it.

    python benchmarks/trackers.py --json benchmarks/results/trackers.json

One run of the quickstart's model and settings on one rank, from weights that are not trained. It logs in blocks of ten
steps, in the order on, off, off, on, ...: in a block that is off, nothing is written, and wandb's processes are stopped
(SIGSTOP). A block has one step whose rollouts are written, as the quickstart has, and one with histograms. Told are

    logging_frac               the seconds that rank 0 spends on writing in the blocks that are on, and on collecting
                               what details.jsonl has, as a share of their steps: what training waits for
    tracker_processor_share    processor seconds of the trackers in the blocks that are on, as a share of those of rank
                               0: what they take from training where no core is idle
    difference                 how much longer the steps of a block that is on take than those of the block beside it
                               that is off, median over pairs of blocks, with an interval of 95 % by resampling pairs:
                               all of the above is in it, and the noise of the machine
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

SCRIPTS = Path(__file__).parents[1] / "training_scripts"
BLOCK = 10


def tracker_processes() -> list[psutil.Process]:
    """The processes of trackers, with what they have started."""
    children = [child for child in psutil.Process().children() if any("follower" in word for word in child.cmdline())]
    return [process for child in children for process in (child, *child.children(recursive=True))]


def processor_seconds(process: psutil.Process) -> float:
    """What a process has used so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


class Clock:
    """Turns logging on and off by blocks of steps, and takes the time of every step and of all writing."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.writing: dict[int, float] = {}
        """Seconds by step."""
        self.used: list[tuple[float, float]] = []
        """Processor seconds of the trackers and of rank 0, when each block begins."""
        self.on = True

    def step(self, number: int) -> None:
        """A step begins."""
        on = ((number - 1) // BLOCK) % 4 in (0, 3)
        if on != self.on:
            self.on = on
            for process in tracker_processes():
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
        if (number - 1) % BLOCK == 0:
            self.used.append((sum(map(processor_seconds, tracker_processes())), time.process_time()))
        self.starts.append(time.perf_counter())

    def wrap(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """A method that does nothing in blocks that are off, and whose time is taken."""

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = work(*arguments, **options) if self.on else None
            step = len(self.starts)
            self.writing[step] = self.writing.get(step, 0.0) + time.perf_counter() - start
            return result

        return timed


def train(arguments: list[str], result: Path) -> None:
    """The run, in this process."""
    from hybrid_grpo.__main__ import main
    from hybrid_grpo.run.records.details import Details
    from hybrid_grpo.run.records.sinks import Log
    from hybrid_grpo.trainer import Trainer

    clock, step = Clock(), Trainer.step

    def timed_step(trainer: Trainer, number: int) -> None:
        clock.step(number)
        step(trainer, number)

    for owner, names in ((Log, ("write", "write_rollouts", "write_details")), (Details, ("learned", "decoded", "own"))):
        for name in names:
            setattr(owner, name, clock.wrap(getattr(owner, name)))
    Trainer.step = timed_step  # type: ignore[method-assign]
    close = Log.close

    def resumed_close(log: Log, *patience: Any, **options: Any) -> None:
        for process in tracker_processes():
            process.send_signal(signal.SIGCONT)
        close(log, *patience, **options)

    Log.close = resumed_close  # type: ignore[method-assign]
    status = main(arguments)
    assert status == 0, status
    result.write_text(json.dumps({"starts": clock.starts, "writing": clock.writing, "used": clock.used}))


def judge(
    starts: list[float], writing: dict[str, float], used: list[tuple[float, float]], skipped: int
) -> dict[str, Any]:
    """The shares, of the blocks behind the first `skipped` ones, which must be even."""
    blocks = (len(starts) - 1) // BLOCK
    seconds = [(starts[(n + 1) * BLOCK] - starts[n * BLOCK]) / BLOCK for n in range(blocks)]
    on = [n % 4 in (0, 3) for n in range(blocks)]
    pairs = [(n, n + 1) if on[n] else (n + 1, n) for n in range(skipped, blocks - 1, 2)]
    differences = [seconds[with_log] / seconds[without] - 1 for with_log, without in pairs]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(differences, k=len(pairs))) for _ in range(2000))
    own = sum(writing[str(step)] for n in range(skipped, blocks) if on[n] for step in steps_of(n))
    whole = sum(seconds[n] * BLOCK for n in range(skipped, blocks) if on[n])
    theirs, ranks = (used[-1][which] - used[skipped][which] for which in (0, 1))
    return {
        "pairs": len(pairs),
        "step_s": round(statistics.median(seconds[skipped:]), 4),
        "own_ms_per_step": round(1000 * own / whole * statistics.median(seconds[skipped:]), 3),
        "logging_frac": round(own / whole, 5),
        "tracker_processor_share": round(2 * theirs / ranks, 5),
        "difference": round(statistics.median(differences), 5),
        "difference_95": [round(medians[50], 5), round(medians[-51], 5)],
    }


def steps_of(block: int) -> range:
    """Numbers of the steps of a block."""
    return range(block * BLOCK + 1, (block + 1) * BLOCK + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--trackers", default="[wandb]", help="as log.trackers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    given, rest = parser.parse_known_args()
    if given.run:
        train(rest, given.run)
        return
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, SCRIPTS / "quickstart_task.py", f"{place}/task"], check=True)
        options = ["train", "--config", str(SCRIPTS / "quickstart.yaml"), "--policy.model", f"{place}/task/model"]
        options += ["--data.path", f"{place}/task/train.jsonl", "--run.dir", place, "--run.steps", str(given.steps)]
        options += [
            "--eval.every",
            "0",
            "--checkpoint.every_minutes",
            "0",
            "--log.wandb",
            "offline",
            "--log.trackers",
            given.trackers,
        ]
        command = [sys.executable, __file__, "--run", f"{place}/seconds.json", *options]
        subprocess.run(command, check=True, env={**os.environ, "WANDB_DATA_DIR": f"{place}/staged"})
        # The first blocks hold the start of the trackers.
        result = judge(**json.loads(Path(place, "seconds.json").read_text()), skipped=4)
    result = {"trackers": given.trackers, "steps": given.steps, "cores": os.cpu_count(), **result}
    print(json.dumps(result, indent=1))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
