"""Seconds from the command to the line of the first step: the quickstart's task on two CPU ranks.

    python benchmarks/start.py --json benchmarks/results/start.json

Kernels are compiled and files are in memory, by a start that is not counted. Two commands take turns: `recipe` is that
of the recipes in training_scripts/, `deepspeed` is the one with DeepSpeed's launcher. Reported are medians of

    launcher     until the interpreter of rank 0 starts
    imports      until the ranks have met, with torch, transformers and DeepSpeed imported and the settings checked
    loading      until the data is read and the memory is planned
    engine       until the model is loaded and DeepSpeed's engine is made
    held_out     until the model is measured on held-out prompts: the line of step 0
    rollout      sampling and scoring of the first step
    step         the rest of that step, until its line
    total        all of them; `fastest` is the shortest of the starts
    processor    processor seconds of all processes until then, trackers included, which vary less if the cores are busy
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SCRIPTS = Path(__file__).parents[1] / "training_scripts"
PARTS = ("launcher", "imports", "loading", "engine", "held_out", "rollout", "step")
TRAIN = (
    f"train --config {SCRIPTS / 'quickstart.yaml'} --run.dir runs --run.steps 2 --policy.model model"
    " --data.path train.jsonl --data.eval_path heldout.jsonl"
)
OWN = f". {SCRIPTS / 'launch.sh'}; launch {TRAIN}"
DEEPSPEED = f"deepspeed --quiet --num_accelerators 2 --no_local_rank --module hybrid_grpo {TRAIN}"
CUSTOMIZE = """
import os, sys, time
if os.environ.get("RANK") == "0" and "hybrid_grpo" in sys.orig_argv:
    def mark(name):
        with open(os.environ["MARKS"], "a") as file:
            print(name, time.time(), file=file)
    class Finder:
        ends = {"hybrid_grpo.run.inputs": "imports", "hybrid_grpo.trainer": "loading"}
        def find_spec(self, name, path=None, target=None):
            if name in self.ends:
                mark(self.ends.pop(name))
    mark("launcher")
    sys.meta_path.insert(0, Finder())
"""
"""A sitecustomize.py, which Python imports when it starts: a part ends where the import of a module begins."""


def measure(command: str, folder: Path) -> dict[str, float]:
    """Return the seconds of each part of a start in `folder`, which has the model and the data of the quickstart."""
    subprocess.run(["rm", "-rf", "runs", "marks"], cwd=folder, check=True)
    path = os.pathsep.join([str(folder / "site"), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "MARKS": str(folder / "marks"), "WANDB_MODE": "offline"}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    ends, processor_s, start = {}, 0.0, time.time()
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            for step, part in ((0, "held_out"), (1, "step")):
                if line.startswith(f"step {step}/"):
                    ends[part] = time.time()
                    processor_s = processor_seconds(process.pid)
    assert process.returncode == 0, command
    ends |= {name: float(end) for name, end in map(str.split, (folder / "marks").read_text().splitlines())}
    ends["engine"] = (folder / "runs/quickstart/deepspeed.json").stat().st_mtime  # written when the engine is there
    lines = map(json.loads, (folder / "runs/quickstart/metrics.jsonl").read_text().splitlines())
    first = next(line for line in lines if line["step"] == 1)
    ends["rollout"] = ends["held_out"] + first["time/generate_s"] + first["time/reward_wait_s"]
    seconds = {part: ends[part] - before for part, before in zip(PARTS, [start, *map(ends.get, PARTS)], strict=False)}
    return {**seconds, "total": ends["step"] - start, "processor": processor_s}


def processor_seconds(pid: int) -> float:
    """Return the processor seconds that a process and its descendants have taken so far."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(of.user + of.system for of in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "site").mkdir()
        (folder / "site/sitecustomize.py").write_text(CUSTOMIZE)
        subprocess.run([sys.executable, SCRIPTS / "quickstart_task.py", folder], check=True)
        commands, found = {"recipe": OWN, "deepspeed": DEEPSPEED}, {}
        for command in commands.values():
            measure(command, folder)
        runs = [{way: measure(command, folder) for way, command in commands.items()} for _ in range(options.repeats)]
        for way in commands:
            found[way] = {part: round(statistics.median(run[way][part] for run in runs), 2) for part in runs[0][way]}
            found[way]["fastest"] = round(min(run[way]["total"] for run in runs), 2)
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
