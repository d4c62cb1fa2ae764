"""A task of your own: rows that are made on the spot, how they become prompts, and what completions are worth.

python -m hybrid_grpo train --config examples/tiny.yaml --data.task examples/own_task.py:reverse
"""

import random
import string
from collections.abc import Iterator

from hybrid_grpo.data.tasks import Row, TaskRecipe


def words(held_out: bool) -> Iterator[Row]:
    """Words without end; no held-out word begins with a letter of the first half of the alphabet."""
    draw = random.Random(0)
    first = string.ascii_lowercase[13:] if held_out else string.ascii_lowercase[:13]
    while True:
        yield {"word": draw.choice(first) + "".join(draw.sample(string.ascii_lowercase, 3))}


def row(row: Row) -> Row:
    """`abcd=` is to be continued with `dcba`."""
    return {"prompt": f"{row['word']}=", "answer": row["word"][::-1]}


def backwards(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """The share of letters in their place."""
    return [
        sum(a == b for a, b in zip(text, target, strict=False)) / max(len(text), len(target))
        for text, target in zip(completions, answer, strict=True)
    ]


reverse = TaskRecipe(
    row=row,
    made=words,
    settings={"data": {"limit": 512, "eval_split": "test", "eval_limit": 64}, "rewards": [":backwards"]},
)
