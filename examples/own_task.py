r"""A task of your own: rows that are made on the spot, how they become prompts, and what completions are worth.

python -m hybrid_grpo train --config examples/tiny.yaml --data.task examples/own_task.py:first_letter \
    --policy.lr 3e-3 --run.steps 100 --eval.every 50
"""

import random
from collections.abc import Iterator

from hybrid_grpo.data.tasks import Row, TaskRecipe

LETTERS = "abcdefgh"


def words(held_out: bool) -> Iterator[Row]:
    """Words without end; the second letter of a held-out word is d or h, of another one it is not."""
    draw = random.Random(0)
    while True:
        word = "".join(draw.choices(LETTERS, k=4))
        if (word[1] in "dh") == held_out:
            yield {"word": word}


def row(row: Row) -> Row:
    """`cafe=` is to be continued with `ccc`."""
    return {"prompt": f"{row['word']}=", "answer": 3 * row["word"][0]}


def in_place(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """The share of letters in their place."""
    return [
        sum(a == b for a, b in zip(text, target, strict=False)) / max(len(text), len(target))
        for text, target in zip(completions, answer, strict=True)
    ]


first_letter = TaskRecipe(
    row=row,
    made=words,
    settings={"data": {"limit": 512, "eval_split": "test", "eval_limit": 64}, "rewards": [":in_place"]},
)
