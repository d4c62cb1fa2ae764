"""A reward model's completions per second on this machine, by batch size.

    python benchmarks/reward_model.py [--layers 4] [--hidden 256] [--completions 512] [--repeats 5] [--json FILE]

A random Qwen2 classifier in float32 and texts whose lengths are quantiles of a log-normal distribution (median 82
characters, one token each, at most 288), the shorter ones first, as they leave a decoder. The batch sizes are timed in
turns; the median of the repeats is shown, with the largest difference from scores computed one by one.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, Qwen2Config

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from char_tokenizer import IDS, char_tokenizer

from hybrid_grpo.config import RewardConfig
from hybrid_grpo.data.batch import Completion, Prompt
from hybrid_grpo.rewards.loader import load_rewards
from hybrid_grpo.rewards.scorer import Rewards

SIZES = (1, 8, 32, 128)


def make_model(folder: Path, layers: int, hidden: int) -> None:
    """Weights and tokenizer in `folder`."""
    config = Qwen2Config(
        vocab_size=len(IDS),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        pad_token_id=IDS["<pad>"],
        num_labels=1,
    )
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)


def lengths(count: int) -> list[int]:
    """Of completions, the shortest first."""
    quantiles = (NormalDist(math.log(50), 0.8).inv_cdf((k + 0.5) / count) for k in range(count))
    return [max(1, min(256, round(math.exp(z)))) for z in quantiles]


def measure(layers: int, hidden: int, count: int, repeats: int) -> dict[str, Any]:
    """Completions per second, by batch size."""
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place), layers, hidden)
        configs = [
            RewardConfig("reward_model", name=f"by_{n}", kwargs={"model": place}, batch_size=n, timeout_s=600)
            for n in SIZES
        ]
        scorers = {n: Rewards(load_rewards([config])) for n, config in zip(SIZES, configs, strict=True)}
        scorers[1].load_models()
    prompts = [Prompt(k, f"{k:032d}", [1], {}) for k in range(count)]
    texts = ["".join("abcdefg"[(k * k + i) % 7] for i in range(n)) for k, n in enumerate(lengths(count))]
    completions = [Completion([1] * len(text), [0.0] * len(text), "stop", text) for text in texts]
    seconds: dict[int, list[float]] = {n: [] for n in SIZES}
    scores = {}
    for _ in range(repeats):
        for n, rewards in scorers.items():
            start = time.perf_counter()
            scores[n] = rewards.score(prompts, completions).reward_B
            seconds[n].append(time.perf_counter() - start)
    return {
        "completions": count,
        "tokens": sum(lengths(count)) + 32 * count,
        "threads": torch.get_num_threads(),
        "completions a second": {n: count / median(times) for n, times in seconds.items()},
        "largest gap": {n: float((scores[n] - scores[1]).abs().max()) for n in SIZES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("hidden", 256), ("completions", 512), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    seen = measure(given.layers, given.hidden, given.completions, given.repeats)
    print(json.dumps(seen, indent=1))
    if given.json:
        given.json.write_text(json.dumps(seen, indent=1) + "\n")


if __name__ == "__main__":
    main()
