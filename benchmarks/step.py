"""A whole GRPO step, ours against TRL's GRPOTrainer: same weights, prompts, limits and optimizer, interleaved.

    python benchmarks/step.py --workload letters,ragged --sides hybrid,trl,hybrid-zero3,trl-zero3 --json FILE
    python benchmarks/step.py --workload head --sides hybrid,plain,trl --repeats 1 --json FILE

A side is a trainer in its own warm process, which sleeps while another side steps. After a warm-up step, each repeat
goes once through all sides. A step is everything from one start to the next. Its time is divided into sampling
(`generate`, including the gathering of weights), waiting for rewards, the reference, `train` (`forward`, with the loss
and the packing of batches, `backward`, `optimizer`) and the rest.

TRL runs in an environment of its own, which is created unless --trl-python names one. Our micro-batches are counted in
tokens, TRL's in rows, as many as that budget allows at full length; and TRL uses its default AdamW, torch's fused one.
If lengths are forced, `forcing_s` is the time this takes in TRL's step.

`letters` is the step of `quickstart.sh --toy` after its warm-up. `ragged` forces the lengths of the
workload of that name in rollout.py, `ragged_states` with a model like Qwen3.5. `head` measures memory: every side has a
fresh process, alone; `plain` is our step with log-probabilities from whole logits. `increment` is the excess of the
peak over the memory before. Further options are settings of both sides.

`gpu_1.5b` trains the shape of Qwen2.5-1.5B in bfloat16 on the workload `gpu_ragged` of rollout.py, one side after the
other. TRL keeps float32 weights and computes in bfloat16, as it does by default; ours, which needs ZeRO for bfloat16
(`hybrid-zero3`), has bfloat16 weights and float32 masters. Our side also reports the gap between sampler and training
forward, and the time of the switch to generation. `toy` shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from machine import chosen, machine, parser_of
from rollout import merge
from step_worker import MARK
from step_workloads import JOBS, ROOT, Job

from hybrid_grpo.run.local_ranks import free_port

HERE = Path(__file__).parent
TRL = Path.home() / ".cache/hybrid_grpo/trl"
TRAIN = ("forward", "backward", "optimizer")
WORST = ("peak_gpu_gb", "logp_gap_mean", "logp_gap_max")
"""Numbers reported by their maximum over the repeats; the gaps, in nats, are between sampler and training forward."""


@dataclass(frozen=True)
class Side:
    """A trainer and how it is started."""

    program: str
    stage: int
    """Of ZeRO."""
    options: tuple[str, ...] = ()

    @property
    def foreign(self) -> bool:
        """Whether it runs in TRL's environment."""
        return self.program == "step_trl.py"

    def command(self, trl_python: Path, spec: Path) -> list[str]:
        """The command line of its worker."""
        program = [str(HERE / self.program), *self.options, str(spec)]
        if not self.foreign:
            return [sys.executable, *program]
        if self.stage == 0:
            return [str(trl_python), *program]
        launcher = [str(trl_python.with_name("deepspeed")), "--num_accelerators", "1", "--no_local_rank"]
        return [*launcher, "--master_port", free_port(), *program]


SIDES = {
    "hybrid": Side("step_hybrid.py", 0),
    "trl": Side("step_trl.py", 0),
    "hybrid-zero2": Side("step_hybrid.py", 2),
    "hybrid-zero3": Side("step_hybrid.py", 3),
    "trl-zero3": Side("step_trl.py", 3),
    "plain": Side("step_hybrid.py", 0, ("--plain",)),
}
FRESH = ("head",)
"""Workloads in which every step has a new process, alone."""
ALONE = ("gpu_1.5b",)
"""Workloads in which a side has all memory: its process ends before the next one starts."""


class Worker:
    """The parent's side of a trainer's process; a context manager that ends it."""

    def __init__(self, name: str, side: Side, spec: dict[str, Any], trl_python: Path, folder: Path) -> None:
        self.name = name
        file = folder / f"{name}.json"
        file.write_text(json.dumps(spec))
        environment = {**os.environ, "OMP_NUM_THREADS": str(spec["threads"]), "HF_HUB_OFFLINE": "1"}
        if side.foreign:
            environment["PATH"] = os.pathsep.join([str(trl_python.parent), environment["PATH"]])
            # Otherwise the two environments would overwrite each other's builds of DeepSpeed's kernels.
            environment["TORCH_EXTENSIONS_DIR"] = str(trl_python.parent.parent / "torch_extensions")
        self.log = folder / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                side.command(trl_python, file), cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()

    def answer(self) -> Any:
        """The worker's next answer; other output is ignored."""
        assert self.process.stdout is not None
        other: list[str] = []
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
            other.append(line)
        sys.exit(f"side {self.name} stopped:\n{''.join(other)[-2000:]}{self.log.read_text()[-3000:]}")

    def ask(self, **command: Any) -> Any:
        """Send a command and wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def step(self, shorten: int = 1) -> dict[str, Any]:
        """One step, with forced completions shorter by a factor; returns what `Measurement.end` does."""
        return self.ask(shorten=shorten)


def measure(
    name: str, job: Job, arguments: argparse.Namespace, folder: Path, keep: Callable[[dict[str, dict[str, Any]]], None]
) -> dict[str, dict[str, Any]]:
    """Every side's results on a workload, which `keep` is given after each round too."""

    def worker(side: str) -> Worker:
        stage, foreign = SIDES[side].stage, SIDES[side].foreign
        spec = job.spec(stage, arguments.threads, arguments.settings, foreign)
        return Worker(side, SIDES[side], spec, arguments.trl_python, folder)

    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in arguments.sides}
    if name in FRESH:
        for side in arguments.sides * arguments.repeats:
            with worker(side) as alone:
                alone.answer()
                # So that the optimizer's state exists before the step that counts.
                alone.step(shorten=16)
                runs[side].append(alone.step())
        return {side: summary(of_side) for side, of_side in runs.items()}
    for together in [[side] for side in arguments.sides] if name in ALONE else [arguments.sides]:
        with ExitStack() as stack:
            workers = [stack.enter_context(worker(side)) for side in together]
            for each in workers:
                each.answer()
            for each in workers:
                each.step()
            for _ in range(arguments.repeats):
                for each in workers:
                    runs[each.name].append(each.step())
                keep({side: summary(of_side) for side, of_side in runs.items() if of_side})
    return {side: summary(of_side) for side, of_side in runs.items()}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One side's results, from its repeats: medians unless stated otherwise."""
    times = [run["seconds"] for run in runs]

    def middle(name: str) -> float:
        return median(run[name] for run in runs)

    stages = {stage: median(run["stages"][stage] for run in runs) for stage in runs[0]["stages"]}
    train = {stage: stages.pop(stage) for stage in TRAIN}
    rest = stages.pop("rest")
    return {
        "median_s": median(times), "min_s": min(times), "max_s": max(times),
        "stages_s": {**stages, "train": sum(train.values()), "rest": rest}, "train_s": train,
        "generated_tokens": middle("generated_tokens"), "trained_tokens": middle("trained_tokens"),
        "computed_over_real": middle("computed_over_real"), "peak_rss_gb": max(run["peak_rss_gb"] for run in runs),
        "increment_gb": max(run["increment_gb"] for run in runs),
        **({"forcing_s": middle("forcing_s")} if runs[0].get("forcing_s") else {}),
        **{name: max(run[name] for run in runs) for name in WORST if name in runs[0]},
        **({"switch_share": middle("switch_s") / median(times)} if "switch_s" in runs[0] else {}), "times_s": times,
    }  # fmt: skip


def show(title: str, results: dict[str, dict[str, Any]]) -> None:
    """The table of one workload; `times` is the median over that of hybrid, stages are in seconds."""
    stages = ("generate", "reward", "reference", "train", *TRAIN, "rest")
    print(f"\n{title}\n{'side':14}{'median s':>9}{'min s':>8}{'max s':>8}{'times':>7}", end="")
    print("".join(f"{stage:>10}" for stage in stages), end="")
    print(f"{'generated':>11}{'trained':>9}{'computed':>9}{'peak GB':>9}{'increment':>10}")
    ours = results.get("hybrid", {}).get("median_s")
    for side, r in results.items():
        times = f"{r['median_s'] / ours:7.2f}" if ours else f"{'':7}"
        print(f"{side:14}{r['median_s']:9.3f}{r['min_s']:8.3f}{r['max_s']:8.3f}{times}", end="")
        print("".join(f"{({**r['stages_s'], **r['train_s']})[stage]:10.3f}" for stage in stages), end="")
        print(f"{r['generated_tokens']:11.0f}{r['trained_tokens']:9.0f}{r['computed_over_real']:9.2f}", end="")
        print(f"{r['peak_rss_gb']:9.2f}{r['increment_gb']:10.2f}", flush=True)


def trl_environment() -> Path:
    """The python of TRL's environment, which is created if it does not exist."""
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run(["bash", str(HERE / "trl_env.sh"), str(TRL)], check=True, env=environment)
    return TRL / "bin/python"


def measured_on(threads: int, trl_python: Path | None) -> dict[str, Any]:
    """The machine and versions that the numbers were measured on."""
    import torch

    found = machine(device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", threads=threads)
    if trl_python is not None:
        program = "from importlib.metadata import version; print(version('trl'))"
        found["trl"] = subprocess.check_output([trl_python, "-c", program], text=True).strip()
    return found


def set_accelerator() -> None:
    """DeepSpeed does not always detect correctly that there is no GPU."""
    import torch

    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--workload", default="letters,ragged", help=f"of {', '.join(JOBS)}, separated by commas")
    parser.add_argument("--sides", default="hybrid,trl,hybrid-zero3,trl-zero3", help=f"of {', '.join(SIDES)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every side")
    parser.add_argument("--trl-python", type=Path, help=f"python of an environment with TRL; not given: made in {TRL}")
    arguments, arguments.settings = parser.parse_known_args()
    arguments.workload = chosen(parser, "workload", arguments.workload, JOBS)
    arguments.sides = chosen(parser, "sides", arguments.sides, SIDES)
    return arguments


def main() -> None:
    arguments = parse()
    set_accelerator()
    if any(SIDES[side].foreign for side in arguments.sides):
        arguments.trl_python = arguments.trl_python or trl_environment()
        if not arguments.trl_python.exists():
            sys.exit(f"--trl-python {arguments.trl_python} is not there: `bash benchmarks/trl_env.sh FOLDER` makes it")
    trl = arguments.trl_python if any(SIDES[side].foreign for side in arguments.sides) else None
    for name in arguments.workload:

        def keep(results: dict[str, dict[str, Any]], name: str = name) -> None:
            if arguments.json:
                merge(arguments.json, measured_on(arguments.threads, trl), name, results)

        with tempfile.TemporaryDirectory() as folder:
            results = measure(name, JOBS[name](Path(folder)), arguments, Path(folder), keep)
        show(name, results)
        keep(results)


if __name__ == "__main__":
    main()
