"""The memory that `train` estimates against the memory that it takes, for models made on the spot.

    python benchmarks/plan.py [CASE ...] [--json benchmarks/results/plan.json]

Each case is a run of its own, under the launcher where it has several ranks; both numbers are those of rank 0, in the
summary that a run ends with (resident memory at its largest, or what torch allocated on the GPU). The case `gpu` runs
on one, and has also what `nvidia-smi` shows beside the whole plan, with CUDA's context and what torch's allocator
holds. Where no case is named, all but that one run, on CPU ranks. Prompts and completions all have the longest length
that the recipe allows, so that a run takes what the plan has to allow for.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import machine, parser_of, save
from plan_gpus import MODELS, ROOT
from step_workloads import save_model


@dataclass(frozen=True)
class Case:
    """Sizes of the model, and dotted settings of the recipe."""

    model: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    prompt: int = 64
    completion: int = 64
    on_gpu: bool = False


SIZES = {
    **{"model_type": "qwen2", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 8192, "tie_word_embeddings": True},
}
FLOAT32 = {"policy.dtype": "float32", "policy.micro_batch_tokens": 1024}
CASES = {
    "letters": Case(
        {**SIZES, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 29},
        {**FLOAT32, "engine.zero_stage": 3},
    ),
    "deep": Case(SIZES, {**FLOAT32, "engine.zero_stage": 0}),
    "checkpointing": Case(SIZES, {**FLOAT32, "engine.zero_stage": 0, "policy.gradient_checkpointing": True}),
    "large vocabulary": Case(
        {**SIZES, "vocab_size": 151_936, "num_hidden_layers": 2, "hidden_size": 256},
        {"engine.zero_stage": 3, "policy.micro_batch_tokens": 1024},
    ),
    "reference": Case(
        {**SIZES, "tie_word_embeddings": False, "num_hidden_layers": 12, "vocab_size": 16_384},
        {**FLOAT32, "engine.zero_stage": 3, "grpo.beta": 0.05},
        ranks=2,
    ),
    "stage 2": Case(
        {**SIZES, "model_type": "llama", "num_hidden_layers": 12},
        {"engine.zero_stage": 2, "policy.micro_batch_tokens": 2048},
        ranks=2,
    ),
    "gpu": Case(
        MODELS["Qwen2.5-1.5B"],
        {
            **{"engine.zero_stage": 3, "policy.gradient_checkpointing": True, "rollout.prompts_per_step": 16},
            **{"run.steps": 2, "checkpoint.every_minutes": 0},  # one would be 18 GB
        },
        prompt=512,
        completion=1024,
        on_gpu=True,
    ),
}


def make(case: Case, folder: Path) -> list[str]:
    """Model and data in `folder`, and the command line of a run."""
    save_model(folder, case.model, "bfloat16" if case.on_gpu else "float32")
    # Each another: a micro-batch computes the same prompt once.
    rows = [{"prompt": letter * case.prompt, "answer": "a"} for letter in "abcdefghijklmnop"]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "policy.model": folder / "model",
        "data.path": folder / "train.jsonl",
        "rollout.max_completion_tokens": case.completion,
        "rollout.ignore_eos": True,
        "rollout.prompts_per_step": 4,
        "rollout.num_generations": 8,
        "rewards": "[{function: letters_in_place}]",
        "run.dir": folder / "runs",
        "run.steps": 3,
        "log.wandb": "disabled",
        # So few steps have no checkpoint that is written beside the next one.
        "checkpoint.asynchronous": False,
        **case.settings,
    }
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Estimated and measured peak of rank 0 in GB, the first over the second, and the plan's own words."""
    launcher = ["deepspeed.launcher.runner", "--num_accelerators", str(case.ranks), "--no_local_rank"]
    launcher += ["--master_port", "29633", "--module"]
    command = [sys.executable, "-m", *(launcher if case.ranks > 1 else []), "hybrid_grpo", "train", *make(case, folder)]
    accelerator = "cuda" if case.on_gpu else "cpu"
    environment = {**os.environ, "DS_ACCELERATOR": accelerator, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    before = used_gb() if case.on_gpu else 0.0
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(process.communicate)
        most = before
        while case.on_gpu and not reading.done():
            most = max(most, used_gb())
            time.sleep(0.5)
        out, _ = reading.result()
    assert process.returncode == 0, out[-5000:]
    found = re.search(r"peak memory of a rank +([\d.]+) GB, ([\d.]+) GB estimated", out)
    words = re.search(r"^memory: (about ([\d.]+) GiB .*)", out, re.MULTILINE)
    assert found and words, out
    measured, estimated = map(float, found.groups())
    of_gpu = {"process GB": round(float(words[2]) * 2**30 / 1e9, 2), "nvidia-smi GB": round(most - before, 2)}
    return {
        "ranks": case.ranks, "measured GB": measured, "estimated GB": estimated,
        "ratio": round(estimated / measured, 3), **(of_gpu if case.on_gpu else {}), "plan": words[1],
    }  # fmt: skip


def used_gb() -> float:
    """Memory in use on the first visible GPU, by all programs, in GB."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", gpu]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 2**20 / 1e9


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; not given: all")
    arguments = parser.parse_args()
    for name in arguments.cases or [name for name, case in CASES.items() if not case.on_gpu]:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(CASES[name], Path(folder))
        print(f"{name:18} {json.dumps(row)}", flush=True)
        seen = json.loads(arguments.json.read_text())["cases"] if arguments.json and arguments.json.exists() else {}
        row = {"model": CASES[name].model, "settings": CASES[name].settings, **row}
        save(arguments.json, {"machine": machine(), "cases": {**seen, name: row}})


if __name__ == "__main__":
    main()
