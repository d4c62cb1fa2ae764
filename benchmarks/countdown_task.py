"""Write a small countdown task to a folder: a tiny model, and three digits to combine into a number.

`358=29:` is to be continued with `3*8+5`, or another expression of the three digits with `+`, `-` and `*` whose value
is 29. The same digits with the same target, in any order, are in one split only. The warm-up's answers are random among
the right ones.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from itertools import combinations_with_replacement
from pathlib import Path

from objectives_rewards import SIGNS, expressions
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).parent.parent / "training_scripts"))

from quickstart_task import make_model

ROWS = {"sft": 12_000, "train": 4_096, "heldout": 512}
SHARES = {"sft": 0.4, "train": 0.4, "heldout": 0.2}
"""Of all combinations of digits and target."""
TARGETS = range(1, 100)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *"0123456789=:", *SIGNS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_rows(seed: int) -> dict[str, list[dict[str, object]]]:
    """Rows of every split."""
    draw = random.Random(seed)
    digits = list(combinations_with_replacement(range(1, 10), 3))
    puzzles = [(nums, target) for nums in digits for target in sorted(expressions(nums)) if target in TARGETS]
    draw.shuffle(puzzles)
    rows: dict[str, list[dict[str, object]]] = {}
    start = 0
    for split, count in ROWS.items():
        end = start + round(SHARES[split] * len(puzzles))
        drawn = draw.choices(puzzles[start:end], k=count)
        rows[split] = [_row(list(nums), target, draw, split == "sft") for nums, target in drawn]
        start = end
    return rows


def _row(nums: list[int], target: int, draw: random.Random, answered: bool) -> dict[str, object]:
    draw.shuffle(nums)
    prompt = f"{''.join(map(str, nums))}={target}:"
    if answered:
        return {"prompt": prompt, "completion": draw.choice(sorted(expressions(tuple(sorted(nums)))[target]))}
    return {"prompt": prompt, "nums": nums, "target": target}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    make_model(tokenizer, arguments.seed).save_pretrained(arguments.folder / "model")
    tokenizer.save_pretrained(arguments.folder / "model")
    for split, rows in make_rows(arguments.seed).items():
        (arguments.folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
