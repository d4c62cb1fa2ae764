"""Write a game to learn to a folder: a tiny model with a chat template, and prompts to begin with.

The warmed-up model knows the form of the game. In a few games it bisects; in all others it guesses at random,
whatever the answers were.
"""

import argparse
import json
import random
from pathlib import Path

from guess_environment import HIDDEN, LETTERS
from letters_task import make_model
from lookup_task import chat_tokenizer

ROWS = {"sft": 12_000, "train": 4_096, "heldout": 512}
GUESSES = 4
HALVING = 0.06
"""Share of the warm-up's games that are played well."""
PIECES = ["user\n", "assistant\n", "guess", "earlier", "later"]
"""Texts that are one token each."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BETWEEN = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def make_rows(seed: int) -> dict[str, list[dict[str, object]]]:
    """Rows of every split. The environment draws the hidden letter."""
    draw = random.Random(seed)
    asked = {"prompt": [{"role": "user", "content": "guess"}]}
    return {"sft": [_game(draw) for _ in range(ROWS["sft"])], **{s: [asked] * ROWS[s] for s in ("train", "heldout")}}


def _game(draw: random.Random) -> dict[str, object]:
    """A whole game as text."""
    letter, halves, said = draw.choice(HIDDEN), draw.random() < HALVING, ""
    left = LETTERS
    for _ in range(GUESSES):
        guess = left[len(left) // 2] if halves else draw.choice(LETTERS)
        if guess == letter:
            break
        told = "later" if guess < letter else "earlier"
        left = "".join(one for one in left if (one > guess) == (guess < letter) and one != guess)
        said += guess + BETWEEN.format(told)
    prompt = "<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\n"
    return {"prompt": prompt, "completion": said + guess}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = chat_tokenizer(LETTERS, PIECES, TEMPLATE)
    make_model(tokenizer, arguments.seed, positions=128).save_pretrained(arguments.folder / "model")
    tokenizer.save_pretrained(arguments.folder / "model")
    for split, rows in make_rows(arguments.seed).items():
        (arguments.folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
