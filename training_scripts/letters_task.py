"""Write the small task to a folder: a tiny Qwen2 model, a character tokenizer, and a task.

The task is the ready-made `letters`: `dcab=` is to be continued with `abcd`. Its answers can be checked, a
model of 0.4M parameters can learn it, and held-out words cannot be memorized.
"""

import argparse
import json
import math
import random
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, logging

from hybrid_grpo.data.tasks.puzzles import WORD_LENGTHS, letters

ROWS = {"sft": 12_000, "train": 4_096, "heldout": 512}
RAGGED_MEDIAN, RAGGED_SIGMA, RAGGED_LONGEST = 6, 0.6, 24
"""Of log-normal lengths, none below 3."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "=", *string.ascii_lowercase])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int, positions: int = 64) -> Qwen2ForCausalLM:
    """A model with random weights, for texts of at most `positions` tokens."""
    logging.disable_progress_bar()  # one of a single file, also in logs
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            initializer_range=0.08,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_rows(seed: int, ragged: bool = False) -> dict[str, list[dict[str, str]]]:
    """Rows of every split; no word is in two splits."""
    draw = random.Random(seed)

    def length() -> int:
        if not ragged:
            return draw.choice(WORD_LENGTHS)
        n = round(draw.lognormvariate(math.log(RAGGED_MEDIAN), RAGGED_SIGMA))
        return min(max(n, 3), RAGGED_LONGEST)

    words: dict[str, None] = {}
    while len(words) < sum(ROWS.values()):
        words["".join(draw.sample(string.ascii_lowercase, length()))] = None
    rest = iter(words)
    splits = {split: [letters({"word": next(rest)}) for _ in range(count)] for split, count in ROWS.items()}
    columns = {"sft": ("prompt", "completion"), "train": ("prompt", "answer"), "heldout": ("prompt", "answer")}
    return {split: [{name: row[name] for name in columns[split]} for row in rows] for split, rows in splits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ragged", action="store_true", help="words of 3 to 24 letters instead of 3 to 6")
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    make_model(tokenizer, arguments.seed).save_pretrained(arguments.folder / "model")
    tokenizer.save_pretrained(arguments.folder / "model")
    for split, rows in make_rows(arguments.seed, arguments.ragged).items():
        (arguments.folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
