"""GRPO on the quickstart's task with a tiny model of each family of architectures, on two ranks at ZeRO-3.

    python benchmarks/families.py [--only lfm2,qwen3_5_text] [--steps 250] [--json FILE]

Each model is trained on supervised pairs, as long as WARM_UP says, and then by GRPO, as the quickstart does. Printed
are held-out accuracy before and after, the gap between sampler and training forward, and seconds a step. `--resume`
also kills a run of 12 steps by SIGKILL in its 8th step and lets it go on: metrics that are no times, and the model,
must be those of a run that was not killed; and it compares the rollouts of one rank with those of two.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "training_scripts"
sys.path[:0] = [str(SCRIPTS)]

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "initializer_range": 0.08,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_num_key_heads": 4,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 2, "chunk_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 256, "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": DELTA,
    "nemotron_h": {**MAMBA, "layers_block_type": ["mamba", "attention", "mlp"]},
    "falcon_h1": {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "glm4_moe_lite": {
        **EXPERTS, "num_key_value_heads": 4, "head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 4,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
}  # fmt: skip


WARM_UP = {"lfm2": 50, "qwen3_5_text": 130, "glm4_moe_lite": 65, "nemotron_h": 100, "falcon_h1": 100}
"""Steps of supervised training that leave something to learn, by family; 50 for others."""


def write_model(family: str, folder: Path) -> None:
    """A model with random weights, and the quickstart's tokenizer."""
    import quickstart_task
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tokenizer = quickstart_task.make_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **ends, **(SIZES | FAMILIES[family]))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def command(kind: str, recipe: str, ranks: int, *given: str) -> list[str]:
    start = ["deepspeed", "--num_accelerators", str(ranks), "--no_local_rank", "--module", "hybrid_grpo", kind]
    return [*start, "--config", str(SCRIPTS / recipe), "--log.trackers", "[]", *given]


def run(arguments: list[str], log: Path) -> None:
    with log.open("a") as file:
        status = subprocess.run(arguments, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    assert status == 0, log.read_text()[-3000:]


def lines(run_folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without times and sizes."""
    moving = ("time/", "throughput/", "memory/")
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(moving)} for row in rows]


def train(family: str, folder: Path, steps: int) -> dict[str, Any]:
    """Warm-up and GRPO, and what came of them."""
    log, task = folder / "log.txt", folder / "task"
    if not (folder / "sft/model").exists():
        write_model(family, folder / "model")
        run([sys.executable, str(SCRIPTS / "quickstart_task.py"), str(task)], log)
        data = ("--policy.model", str(folder / "model"), "--data.path", str(task / "sft.jsonl"))
        steps_of_sft = ("--run.steps", str(WARM_UP.get(family, 50)))
        run(
            command(
                "sft", "quickstart_sft.yaml", 2, "--run.dir", str(folder), "--run.name", "sft", *data, *steps_of_sft
            ),
            log,
        )
    grpo(folder, "grpo", 2, steps, log)
    rows = [json.loads(line) for line in (folder / "grpo/metrics.jsonl").read_text().splitlines()]
    accuracy = [row["eval/heldout/accuracy"] for row in rows if "eval/heldout/accuracy" in row]
    return {
        "before": accuracy[0], "after": accuracy[-1],
        "largest_gap": max(row.get("parity/logp_abs_diff_max", 0.0) for row in rows),
        "step_s": statistics.median(row["time/step_s"] for row in rows if "time/step_s" in row),
    }  # fmt: skip


def grpo(folder: Path, name: str, ranks: int, steps: int, log: Path, *more: str) -> None:
    run(grpo_command(folder, name, ranks, steps, *more), log)


def grpo_command(folder: Path, name: str, ranks: int, steps: int, *more: str) -> list[str]:
    data = ("--data.path", str(folder / "task/train.jsonl"), "--data.eval_path", str(folder / "task/heldout.jsonl"))
    where = ("--run.dir", str(folder), "--run.name", name, "--run.steps", str(steps))
    return command("train", "quickstart.yaml", ranks, *where, "--policy.model", str(folder / "sft/model"), *data, *more)


def resume(folder: Path) -> dict[str, Any]:
    """A run of 12 steps, the same one killed and gone on, and its first steps on one rank."""
    log, often = folder / "log.txt", ("--checkpoint.every", "4", "--log.rollouts_every", "1")
    grpo(folder, "whole", 2, 12, log, *often)
    with log.open("a") as file:
        killed = subprocess.Popen(
            grpo_command(folder, "killed", 2, 12, *often), stdout=file, stderr=file, start_new_session=True
        )
    metrics = folder / "killed/metrics.jsonl"
    while killed.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < 8):
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    time.sleep(1)
    grpo(folder, "killed", 2, 12, log, *often, "--run.resume", "auto")
    grpo(folder, "alone", 1, 3, log, *often)
    names = [f"rollouts/step_{step:06d}.jsonl" for step in range(1, 13)]

    def sampled(run_name: str, name: str) -> list[tuple[Any, ...]]:
        rows = map(json.loads, (folder / run_name / name).read_text().splitlines())
        return sorted((row["prompt_id"], row["sample"], row["completion"]) for row in rows)

    whole = lines(folder / "whole")
    weights = [(folder / name / "model/model.safetensors").read_bytes() for name in ("whole", "killed")]
    return {
        "resumed_metrics_differ": sum(a != b for a, b in zip(whole, lines(folder / "killed"), strict=True)),
        "resumed_model_equal": weights[0] == weights[1],
        "one_rank_rollouts_equal": sum(sampled("whole", name) == sampled("alone", name) for name in names[:3]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="families, separated by commas")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--folder", type=Path, help="keeps the runs")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--json", type=Path, help="results; those of other families in the file are kept")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        for family in options.only.split(",") if options.only else FAMILIES:
            folder = (options.folder or Path(place)) / family
            folder.mkdir(parents=True, exist_ok=True)
            found = train(family, folder, options.steps) | (resume(folder) if options.resume else {})
            kept[family] = kept.get(family, {}) | found | {"steps": options.steps}
            print(json.dumps({family: kept[family]}), flush=True)
            if options.json:
                options.json.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
