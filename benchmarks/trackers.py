"""The cost of logging in a step of the quickstart's size: everything that a run writes, and wandb.

    python benchmarks/trackers.py --json benchmarks/results/trackers.json

Two runs of the quickstart's model and settings on one rank, from untrained weights. The first logs in blocks of ten
steps, in the order on, off, off, on, ...: in an off block nothing is written, and wandb's processes are stopped
(SIGSTOP). The second logs in the other blocks, and makes the same steps to the bit. As in the quickstart, a block has
one step whose rollouts are written, and one with histograms. Reported are

    logging_frac               the seconds that rank 0 spends on writing in the blocks that are on, and on collecting
                               what details.jsonl has, as a share of their steps: what training waits for
    tracker_processor_share    processor seconds of the trackers in the blocks that are on, as a share of those of rank
                               0: what they take from training where no core is idle
    difference                 how much longer a block takes in the run in which it is on than in the other, whose
                               other speed falls out over two blocks; median over pairs of blocks, with an interval of
                               95 % by resampling pairs: all of the above is in it, and the noise of the machine
    processor_difference       the same of rank 0's processor seconds, which vary less: what logging makes it do, at
                               whatever place, but not how trackers slow it down
"""

from __future__ import annotations

import argparse
import json
import math
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
FIRST, SECOND = "first", "second"
RECORDED = "starts", "processor_starts", "writing", "used"


def tracker_processes() -> list[psutil.Process]:
    """The trackers' processes and their children."""
    children = [child for child in psutil.Process().children() if any("follower" in word for word in child.cmdline())]
    return [process for child in children for process in (child, *child.children(recursive=True))]


def processor_seconds(process: psutil.Process) -> float:
    """Processor seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


class Clock:
    """Turns logging on and off by blocks of steps, and times every step and all writing."""

    def __init__(self, is_second: bool) -> None:
        self._is_second = is_second
        self.starts: list[float] = []
        self.processor_starts: list[float] = []
        self.writing: dict[int, float] = {}
        """Seconds by step."""
        self.used: list[tuple[float, float]] = []
        """Processor seconds of the trackers and of rank 0, when each block begins."""
        self.on = True

    def step(self, number: int) -> None:
        """A step begins."""
        on = is_on((number - 1) // BLOCK, self._is_second)
        if on != self.on:
            self.on = on
            for process in tracker_processes():
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
        if (number - 1) % BLOCK == 0:
            self.used.append((sum(map(processor_seconds, tracker_processes())), time.process_time()))
        self.starts.append(time.perf_counter())
        self.processor_starts.append(time.process_time())

    def wrap(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a method do nothing in off blocks, and times it."""

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = work(*arguments, **options) if self.on else None
            step = len(self.starts)
            self.writing[step] = self.writing.get(step, 0.0) + time.perf_counter() - start
            return result

        return timed


def is_on(block: int, is_second: bool) -> bool:
    """Whether a run logs in a block."""
    return (block % 4 in (0, 3)) != is_second


def train(arguments: list[str], result: Path) -> None:
    """A run, in this process."""
    from hybrid_grpo.__main__ import main
    from hybrid_grpo.records.sinks import Log
    from hybrid_grpo.records.step_trace import StepTrace
    from hybrid_grpo.trainer import Trainer

    clock, step = Clock(is_second=result.stem == SECOND), Trainer.step

    def timed_step(trainer: Trainer, number: int) -> None:
        clock.step(number)
        step(trainer, number)

    for owner, names in ((Log, ("write", "write_rollouts", "write_trace")), (StepTrace, ("learned", "decoded", "own"))):
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
    result.write_text(json.dumps({name: seconds for name, seconds in vars(clock).items() if name in RECORDED}))


def judge(runs: list[dict[str, Any]], skipped: int) -> dict[str, Any]:
    """The shares, over the blocks of both runs after the first `skipped` ones, an even number."""
    seconds = [by_block(run["starts"]) for run in runs]
    blocks = len(seconds[0])
    on = [(run, n) for run in (0, 1) for n in range(skipped, blocks) if is_on(n, bool(run))]
    own = sum(runs[run]["writing"][str(step)] for run, n in on for step in steps_of(n))
    whole = sum(seconds[run][n] for run, n in on)
    theirs, ranks = (sum(run["used"][-1][which] - run["used"][skipped][which] for run in runs) for which in (0, 1))
    step_s = statistics.median(block_s for run in seconds for block_s in run[skipped:]) / BLOCK
    return {
        "pairs": (blocks - skipped) // 2,
        "step_s": round(step_s, 4),
        "own_ms_per_step": round(1000 * own / whole * step_s, 3),
        "logging_frac": round(own / whole, 5),
        "tracker_processor_share": round(2 * theirs / ranks, 5),
        **longer("difference", seconds, skipped),
        **longer("processor_difference", [by_block(run["processor_starts"]) for run in runs], skipped),
    }


def longer(name: str, seconds: list[list[float]], skipped: int) -> dict[str, Any]:
    """How much longer a block takes when logging is on, from the seconds of the blocks of both runs."""
    logs = [math.log(seconds[is_on(n, True)][n] / seconds[is_on(n, False)][n]) for n in range(len(seconds[0]))]
    differences = [math.expm1((logs[n] + logs[n + 1]) / 2) for n in range(skipped, len(logs) - 1, 2)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(differences, k=len(differences))) for _ in range(2000))
    return {
        name: round(statistics.median(differences), 5),
        f"{name}_95": [round(medians[50], 5), round(medians[-51], 5)],
    }


def by_block(starts: list[float]) -> list[float]:
    """Seconds of every block, from when its steps begin."""
    return [starts[n + BLOCK] - starts[n] for n in range(0, len(starts) - BLOCK, BLOCK)]


def steps_of(block: int) -> range:
    """Numbers of the steps of a block."""
    return range(block * BLOCK + 1, (block + 1) * BLOCK + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--trackers", default="[wandb]", help="as log.trackers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--raw", type=Path, help="a file for the times of all steps")
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
        runs = []
        for name in (FIRST, SECOND):
            seconds = Path(place, f"{name}.json")
            command = [sys.executable, __file__, "--run", str(seconds), *options, "--run.name", name]
            subprocess.run(command, check=True, env={**os.environ, "WANDB_DATA_DIR": f"{place}/staged"})
            runs.append(json.loads(seconds.read_text()))
        # The first blocks hold the start of the trackers.
        result = judge(runs, skipped=4)
        if given.raw:
            given.raw.write_text(json.dumps(runs))
    result = {"trackers": given.trackers, "steps": given.steps, "cores": os.cpu_count(), **result}
    print(json.dumps(result, indent=1))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
