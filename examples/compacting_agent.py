"""An agent that forgets: it reads letters one by one, and answers each with the first of all. Whenever its history
reaches a limit it writes a note, and goes on with that alone. Notes and answers share one reward, so it learns to write
down what it will need.

python training_scripts/lookup_task.py runs/lookup-task
python -m hybrid_grpo train --config examples/tiny.yaml --data.task examples/compacting_agent.py:letters \
    --policy.model runs/lookup-task/model --rollout.agent examples/compacting_agent.py:remembers --run.name compacting \
    --rollout.max_turns 11 --rollout.max_completion_tokens 36 --rollout.max_total_tokens 64 \
    --policy.lr 1e-3 --run.steps 200 --eval.every 50
"""

import random
from collections.abc import Iterator

from hybrid_grpo.data.tasks import Row, TaskRecipe

LETTERS = "abcdefgh"
LIMIT = 16
"""Tokens of a history after which it is compacted."""


def words(held_out: bool) -> Iterator[Row]:
    """Six letters; the second one of a held-out word is d or h, of another one it is not."""
    draw = random.Random(0)
    while True:
        word = "".join(draw.choices(LETTERS, k=6))
        if (word[1] in "dh") == held_out:
            yield {"word": word}


def row(row: Row) -> Row:
    return {"prompt": [{"role": "user", "content": row["word"][0]}], **row}


async def remembers(task, client):
    """The share of answers that are right; those that only begin right count half."""

    async def ask(text):
        chat.append({"role": "user", "content": text})
        reply = await client.chat.completions.create(model="policy", messages=chat, max_tokens=3)
        chat.append({"role": "assistant", "content": reply.choices[0].message.content})
        return chat[-1]["content"], reply.usage.total_tokens

    word, chat, note, right = task["word"], [], "", 0
    for place, letter in enumerate(word):
        said, tokens = await ask(note + letter)
        right += ((said == word[0]) + said.startswith(word[0])) / 2
        note = ""
        if tokens > LIMIT and place < len(word) - 1:
            note, _ = await ask("?")
            chat = []
    return right / len(word)


letters = TaskRecipe(
    row=row,
    made=words,
    settings={"data": {"limit": 2048, "eval_split": "test", "eval_limit": 128}, "rewards": []},
)
