"""Steps on prompts with pictures, beside TRL's on the same model, rows, rewards and settings.

    python benchmarks/pictures.py --trl PYTHON [--model llava|gemma3] [--json FILE]

The model is a small random LLaVA or Gemma 3 with its tower. A prompt has one picture, of which the tower makes 256
tokens, and eight completions that all have 16 tokens. TRL trains the tower too; here it is frozen, and trained in
another run. Each is one process with two threads; they take turns, and the median of their steps, from the third on, is
compared. PYTHON is that of an environment created by `bash
benchmarks/trl_env.sh FOLDER`, in which pillow is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "benchmarks")]

PROMPTS, GENERATIONS, TOKENS = 8, 8, 16
SIDE, PATCH, SEEN = 64, 4, 256


def make(folder: Path, kind: str, pictures: int) -> None:
    """Write the model, its processor, and rows of different pictures."""
    import numpy as np
    import transformers as tf
    from PIL import Image
    from seeing import FAMILIES, tokenizer_of

    family, build = FAMILIES[kind]
    tokenizer = tokenizer_of(family)
    config, processor = build(kind, tokenizer)
    config.text_config.update({"hidden_size": 256, "intermediate_size": 512, "vocab_size": len(tokenizer)})
    config.text_config.update({"attention_bias": False, "mlp_bias": False} if kind == "llava" else {})
    tower = {"image_size": SIDE, "patch_size": PATCH, "hidden_size": 128, "num_hidden_layers": 4}
    config.vision_config.update(tower)
    if kind == "gemma3":
        config.mm_tokens_per_image = SEEN
        config.text_config.sliding_window = 64
        images = tf.Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}, image_seq_length=SEEN)
        settings: dict[str, Any] = {"image_seq_length": SEEN}
    else:
        images = tf.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
        names = ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens")
        settings = {name: getattr(processor, name) for name in names}
    tf.AutoModelForImageTextToText.from_config(config).save_pretrained(folder / "model")
    images.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    settings["processor_class"] = type(processor).__name__
    (folder / "model/processor_config.json").write_text(json.dumps(settings))
    draw, rows = np.random.default_rng(0), []
    for number in range(pictures):
        pixels = draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        content = [{"type": "image"}, {"type": "text", "text": f"What is there in picture {number}?"}]
        rows.append({"prompt": [{"role": "user", "content": content}], "images": [f"{number}.png"]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "kinds.py").write_text(
        "def kinds(completions, **_):\n    return [len(set(str(c))) / 30 for c in completions]\n"
    )


def ours(folder: Path, steps: int, turn: int, vision: str) -> tuple[list[float], float]:
    """Return the seconds of steps, and the process's peak memory in GB."""
    name = f"run_{vision}{turn}"
    settings = {
        **{
            "run.name": name,
            "policy.vision": vision,
            "run.dir": folder,
            "run.steps": steps,
            "policy.model": folder / "model",
        },
        **{
            "data.max_prompt_tokens": 512,
            "policy.dtype": "float32",
            "policy.lr": 1e-4,
            "data.path": folder / "rows.jsonl",
        },
        "data.shuffle": "false",
        **{"rollout.prompts_per_step": PROMPTS, "rollout.num_generations": GENERATIONS, "log.wandb": "disabled"},
        **{"rollout.max_completion_tokens": TOKENS, "rollout.ignore_eos": "true", "policy.verify": "off"},
        "rewards": f"[{{function: {folder}/kinds.py:kinds}}]",
    }
    given = [f"--{name}={value}" for name, value in settings.items()]
    peak = measured([sys.executable, "-m", "hybrid_grpo", "train", *given])
    rows = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [row["time/step_s"] for row in rows if "time/step_s" in row], peak


def theirs(folder: Path, steps: int, python: Path) -> tuple[list[float], float]:
    """The same of TRL."""
    task = {"folder": str(folder), "steps": steps, "prompts": PROMPTS, "generations": GENERATIONS, "tokens": TOKENS}
    peak = measured([str(python), str(ROOT / "benchmarks/pictures_trl.py"), json.dumps(task)])
    return json.loads((folder / "trl.json").read_text()), peak


def measured(command: list[str]) -> float:
    """Run a command, and return its peak memory in GB."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "DS_ACCELERATOR": "cpu", "WANDB_MODE": "disabled"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, said[-3000:]
    return usage.ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", type=Path, required=True, help="python of an environment with TRL and pillow")
    parser.add_argument("--model", choices=("gemma3", "llava"), default="llava", help="a model type")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, list[Any]] = {"frozen": [], "trained": [], "TRL": []}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make(folder, given.model, PROMPTS * given.steps)
        for turn in range(given.turns):
            for vision in ("frozen", "trained"):
                found[vision].append(ours(folder, given.steps, turn, vision))
            found["TRL"].append(theirs(folder, given.steps, given.trl))
    result: dict[str, Any] = {
        side: {
            "step_s": statistics.median(s for steps, _ in turns for s in steps[2:]),
            "peak_gb": max(peak for _, peak in turns),
        }
        for side, turns in found.items()
    }
    for vision in ("frozen", "trained"):
        result[vision]["TRL's by this"] = result["TRL"]["step_s"] / result[vision]["step_s"]
    print(json.dumps(result, indent=1))
    if given.json:
        from step import machine

        given.json.write_text(
            json.dumps(
                {"machine": machine(2, given.trl), "model": given.model, "steps": given.steps, **result}, indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
