"""Write a task that needs a tool to a folder: a tiny model with a chat template, and keys to look up.

The table is hidden: the value of a key is a letter of its hash, and only the tool `look_up` (lookup_tools.py) knows it.
The warmed-up model calls the tool for some of the keys, and guesses the others.
"""

import argparse
import json
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from letters_task import make_model
from lookup_tools import look_up
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROWS = {"sft": 12_000, "train": 4_096, "heldout": 256}
KEY_LENGTH = 4
CALLING = 0.2
"""Share of the warm-up's rows that call the tool."""
CALL, CALLED = '<tool_call>\n{"name": "look_up", "arguments": {"key": "', '"}}\n</tool_call>'
PIECES = ["user\n", "assistant\n", "<tool_response>\n", "\n</tool_response>"]
"""Texts that are one token each, as are those of calls: a tiny model learns the task, not the spelling of JSON."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{% if tools and loop.first %}<tools>look_up</tools>{% endif %}"
    "{% if message.role == 'tool' %}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(
    tool: str = "look_up", pieces: Sequence[str] = (CALL, CALLED), characters: str = string.ascii_lowercase
) -> PreTrainedTokenizerFast:
    """One token for each character, each of PIECES, and each of `pieces`, those of calls of the tool."""
    every = [*pieces, *PIECES, f"<tools>{tool}</tools>"]
    return chat_tokenizer(["?", *characters], every, TEMPLATE.replace("look_up", tool))


def chat_tokenizer(characters: Sequence[str], pieces: Sequence[str], template: str) -> PreTrainedTokenizerFast:
    """One token for each character and each piece, for chats that `template` writes."""
    tokens = ["<pad>", "<|im_start|>", "<|im_end|>", "\n", *characters]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    made.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    made.chat_template = template
    return made


def make_rows(seed: int) -> dict[str, list[dict[str, object]]]:
    """Rows of every split; no key is in two splits."""
    draw = random.Random(seed)
    keys: dict[str, None] = {}
    while len(keys) < sum(ROWS.values()):
        keys["".join(draw.choices(string.ascii_lowercase, k=KEY_LENGTH))] = None
    rest = iter(keys)
    splits = {split: [next(rest) for _ in range(count)] for split, count in ROWS.items()}
    asked = {
        split: [{"prompt": [{"role": "user", "content": key}], "answer": look_up(key)} for key in splits[split]]
        for split in ("train", "heldout")
    }
    return {"sft": [_warm_up(key, draw) for key in splits["sft"]], **asked}


def _warm_up(key: str, draw: random.Random) -> dict[str, object]:
    """A whole conversation: one in five looks up, the others guess."""
    answer = look_up(key)
    if draw.random() < CALLING:
        return warm_up("look_up", key, f"{CALL}{key}{CALLED}", answer, answer)
    return warm_up("look_up", key, None, "", draw.choice("abcdefghij"))


def warm_up(tool: str, question: str, call: str | None, result: str, answer: str) -> dict[str, object]:
    """A whole conversation as text, with a call of the tool or without."""
    told = (
        f"{call}<|im_end|>\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    prompt = f"<|im_start|>user\n<tools>{tool}</tools>{question}<|im_end|>\n<|im_start|>assistant\n"
    return {"prompt": prompt, "completion": (told if call else "") + answer}


def write_task(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, rows: dict[str, list[Any]]) -> None:
    """Save the tiny model with its tokenizer, and the rows of every split."""
    make_model(tokenizer, seed, positions=128).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for split, of_split in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_split))


def read_arguments(description: str) -> argparse.Namespace:
    """The folder and the seed of a task."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    given = read_arguments(__doc__)
    write_task(given.folder, make_tokenizer(), given.seed, make_rows(given.seed))


if __name__ == "__main__":
    main()
