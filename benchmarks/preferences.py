"""The reward model stage against TRL's RewardTrainer, on the same weights and pairs: differences of loss, accuracy and
gradients.

    python benchmarks/preferences.py --json FILE

Both sides read the same classifier and rows, tokenize them, and compute one step's loss and the gradients of all
weights in float32; ours packs the texts, TRL pads them. TRL runs in a separate environment, which is created unless
--trl-python names one. TRL adds an end-of-sequence token to every text that is not a chat; here the rows already
contain it, so that both read the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests/support"))

import torch
from char_tokenizer import IDS, TEMPLATE, char_tokenizer
from safetensors.torch import load_file
from step import machine, set_accelerator, trl_environment
from tiny_models import tiny_config
from transformers import AutoModelForSequenceClassification

from hybrid_grpo import engine
from hybrid_grpo.commands.stages.preferences import read_preferences
from hybrid_grpo.commands.stages.reward import RewardTrainer
from hybrid_grpo.config import RewardStageConfig
from hybrid_grpo.config.parsing import configure
from hybrid_grpo.model.loading import load_tokenizer
from hybrid_grpo.policy import Scorer

HERE = Path(__file__).parent
PAIRS = 64
CASES: dict[str, dict[str, Any]] = {
    "text": {"architecture": "qwen2"},
    "text, explicit prompt, margins": {"architecture": "llama", "prompt": True, "margin": True},
    "chats, margins, centred": {"architecture": "qwen2", "chat": True, "margin": True, "center": 0.01},
    "chats, explicit prompt, centred": {"architecture": "gpt2", "chat": True, "prompt": True, "center": 0.1},
}


def make_rows(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Pairs of random letters."""
    draw = random.Random(0)

    def letters() -> str:
        return "".join(draw.choices("abcdefghijklmnop ", k=draw.randint(1, 40)))

    rows = []
    for _ in range(PAIRS):
        question, answers = letters(), [letters(), letters()]
        if case.get("chat"):
            asked = [{"role": "user", "content": question}]
            texts = [[{"role": "assistant", "content": answer}] for answer in answers]
        else:
            asked, texts = question, [f"{answer}<eos>" for answer in answers]
        start = {"prompt": asked} if case.get("prompt") else {}
        texts = texts if start else [asked + text for text in texts]
        margin = {"margin": draw.random()} if case.get("margin") else {}
        rows.append({**start, "chosen": texts[0], "rejected": texts[1], **margin})
    return rows


def ours(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Our stage's numbers on all pairs as one batch, and its gradients as tensors by name."""
    settings = {
        "policy": {"model": str(folder / "model"), "dtype": "float32", "micro_batch_tokens": 1024},
        "engine": {"zero_stage": 0, "adam": "torch"},
        "data": {"path": str(folder / "pairs.jsonl"), "shuffle": False},
        "reward": {"batch_size": PAIRS, "center_coefficient": case.get("center", 0.0)},
    }
    config = configure(RewardStageConfig, settings).config
    tokenizer = load_tokenizer(config.policy.model)
    pairs, _ = read_preferences(config.data, config.reward, tokenizer)
    scorer = Scorer(config.policy, config.engine, tokenizer, 1, padding=IDS["<pad>"])
    stage = RewardTrainer(config, scorer, pairs, [], scorer.engine.device)
    losses, right = [], 0
    batches = scorer.pair_batches([pair.texts for pair in pairs])
    for micro in batches:
        loss_p, chosen_p, rejected_p = stage.compare(micro, pairs)
        scorer.engine.backward(loss_p.sum() / PAIRS)
        losses.append(loss_p.detach().double().sum() / PAIRS)
        right += int((chosen_p > rejected_p).sum())
    module = scorer.engine.engine.module
    gradients = {name.removeprefix("model."): p.grad.clone() for name, p in module.named_parameters()}
    return {
        **{"loss": float(sum(losses)), "accuracy": right / PAIRS, "gradients": gradients},
        **{"texts": [pair.texts for pair in pairs], "micro_batches": len(batches)},
    }


def compare(name: str, folder: Path, trl_python: Path) -> dict[str, Any]:
    """Run both sides on a case; the differences between them."""
    case = CASES[name]
    (folder / "model").mkdir(parents=True)
    config = tiny_config(case["architecture"], hidden=64, layers=3, vocab_size=len(IDS), num_labels=1)
    config.pad_token_id = IDS["<pad>"]
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder / "model")
    char_tokenizer(TEMPLATE).save_pretrained(folder / "model")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(case)))
    command = [trl_python, HERE / "preferences_trl.py", folder, str(case.get("center", 0.0))]
    ours_alone = ("PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ours_alone}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    theirs, mine = json.loads((folder / "trl.json").read_text()), ours(folder, case)
    assert theirs["texts"] == [list(texts) for texts in mine["texts"]], "tokens differ"
    gradients = load_file(folder / "trl.safetensors")
    assert gradients.keys() == mine["gradients"].keys()
    apart = {
        name: float((mine["gradients"][name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in gradients.items()
    }
    return {
        "case": name,
        "architecture": case["architecture"],
        "micro_batches": mine["micro_batches"],
        "loss": {"hybrid_grpo": mine["loss"], "trl": theirs["loss"], "apart": abs(mine["loss"] - theirs["loss"])},
        "accuracy": {"hybrid_grpo": mine["accuracy"], "trl": theirs["accuracy"]},
        "gradients": {"tensors": len(apart), "apart": max(apart.values()), "of": max(apart, key=apart.__getitem__)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", type=Path, help="see step.py")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    trl_python = arguments.trl_python or trl_environment()
    set_accelerator()
    engine.start()
    with tempfile.TemporaryDirectory() as folder:
        results = [compare(name, Path(folder, str(number)), trl_python) for number, name in enumerate(CASES)]
    for result in results:
        print(json.dumps(result))
    if arguments.json:
        about = {
            "command": "python benchmarks/preferences.py --json benchmarks/results/reward_model_trl.json",
            "what": "apart: largest absolute difference; of gradients relative to the largest number of each tensor",
            "machine": machine(torch.get_num_threads(), trl_python),
        }
        arguments.json.write_text(json.dumps({**about, "results": results}, indent=2) + "\n")
    worst = max(max(result["loss"]["apart"], result["gradients"]["apart"]) for result in results)
    same = all(result["accuracy"]["hybrid_grpo"] == result["accuracy"]["trl"] for result in results)
    sys.exit(0 if worst <= 1e-5 and same else f"the two sides are {worst:.1e} apart, the same accuracy: {same}")


if __name__ == "__main__":
    main()
