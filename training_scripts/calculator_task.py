"""Write a task that needs the tool `calculator` to a folder: a tiny model with a chat template, and sums, differences
and products of two two-digit numbers.

The warmed-up model calls the tool for some of them, and guesses the results of the others.
"""

import random
import string
from itertools import islice, product

from lookup_task import CALLED, CALLING, make_tokenizer, read_arguments, warm_up, write_task

ROWS = {"sft": 12_000, "train": 4_096, "heldout": 256}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "'
VALUE = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def make_rows(seed: int) -> dict[str, list[dict[str, object]]]:
    """Rows of every split; no expression is in two splits."""
    draw = random.Random(seed)
    numbers = range(10, 100)
    every = [(f"{a}{sign}{b}", str(VALUE[sign](a, b))) for a, sign, b in product(numbers, VALUE, numbers)]
    draw.shuffle(every)
    rest = iter(every)
    splits = {split: list(islice(rest, count)) for split, count in ROWS.items()}
    rows: dict[str, list[dict[str, object]]] = {
        split: [{"prompt": [{"role": "user", "content": asked}], "answer": value} for asked, value in splits[split]]
        for split in ("train", "heldout")
    }
    return {"sft": [_warm_up(asked, value, draw) for asked, value in splits["sft"]], **rows}


def _warm_up(asked: str, value: str, draw: random.Random) -> dict[str, object]:
    if draw.random() < CALLING:
        return warm_up("calculator", asked, f"{CALL}{asked}{CALLED}", value, value)
    return warm_up("calculator", asked, None, "", "".join(draw.choices(string.digits, k=len(value))))


def main() -> None:
    given = read_arguments(__doc__)
    tokenizer = make_tokenizer("calculator", [CALL, CALLED], string.digits + "+-*")
    write_task(given.folder, tokenizer, given.seed, make_rows(given.seed))


if __name__ == "__main__":
    main()
