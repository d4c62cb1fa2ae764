"""What streaming saves: seconds to the first step, and memory, of a run on a large JSONL file, read whole or streamed.

    python benchmarks/streaming.py [--megabytes 300] [--json FILE]

The rows are words for the task of the quickstart, each with a text of 2,000 letters in another column, as a reference
solution would be. A run is a separate process on one rank, with the tiny model of the quickstart, and makes one step on
64 prompts; a third run reads only the first 1,000 rows, which shows the fixed cost. Seconds are from the start of the
process to the end of the step, and processor seconds of the whole process, which depend less on other programs. Memory
is the maximum resident size.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "training_scripts"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_rows(path: Path, megabytes: float) -> int:
    """Write rows until the file has this size; returns their number."""
    source, rows = random.Random(0), 0
    with path.open("w") as file:
        while file.tell() < megabytes * 1e6:
            word = "".join(source.sample(LETTERS, 6))
            text = word * 333
            row = {"prompt": f"{word}=", "answer": "".join(sorted(word)), "solution": text}
            file.write(json.dumps(row) + "\n")
            rows += 1
    return rows


def first_step(folder: Path, *settings: str) -> dict[str, Any]:
    """Seconds, processor seconds and GB of a run of one step."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "WANDB_MODE": "disabled"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "hybrid_grpo", "train", "--config", str(SCRIPTS / "quickstart.yaml")]
    command += ["--policy.model", str(folder / "task/model"), "--run.dir", str(folder / "runs"), "--run.steps", "1"]
    command += ["--data.max_prompt_tokens", "8", "--data.eval_path", "null", "--eval.every", "0"]
    command += ["--rollout.prompts_per_step", "64", "--rollout.num_generations", "4", "--log.wandb", "disabled"]
    command += ["--checkpoint.every", "0", "--checkpoint.every_minutes", "0", *settings]
    start, seconds, said = time.perf_counter(), None, []
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if line.startswith("step 1/1"):
            seconds = time.perf_counter() - start
    _, status, used = os.wait4(process.pid, 0)
    if status or seconds is None:
        raise SystemExit(f"{' '.join(command)}\n{''.join(said)}")
    processor = used.ru_utime + used.ru_stime
    memory = used.ru_maxrss * 1024 / 1e9
    return {
        "seconds": round(seconds, 1), "processor_seconds": round(processor, 1), "memory_gb": round(memory, 2)
    }  # fmt: skip


def main() -> None:
    """Measure the three runs, print the numbers, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        subprocess.run([sys.executable, str(SCRIPTS / "quickstart_task.py"), str(folder / "task")], check=True)
        path = folder / "rows.jsonl"
        result: dict[str, Any] = {"rows": write_rows(path, options.megabytes), "bytes": path.stat().st_size}
        print(f"{result['rows']:,} rows of {result['bytes'] / 1e6:.0f} MB", flush=True)
        for name, settings in {
            "first 1,000 rows": ["--data.limit", "1000"],
            "streamed": ["--streaming.enabled", "true"],
            "whole": [],
        }.items():
            run = ["--run.name", name.replace(" ", "-").replace(",", ""), "--data.path", str(path), *settings]
            result[name] = first_step(folder, *run)
            seconds, processor, memory = result[name].values()
            print(f"{name:16} {seconds:6.1f} s {processor:6.1f} s of processor {memory:6.2f} GB", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
