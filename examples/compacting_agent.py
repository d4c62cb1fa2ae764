r"""An agent that forgets: it keeps a total of many numbers. Whenever its history reaches a limit it writes notes, and
goes on with these alone. Notes and totals share one reward, so it learns to write down what it will need.

python -m hybrid_grpo train --config training_scripts/quickstart.yaml --config examples/compacting_agent.yaml \
    --policy.model ~/.cache/hybrid_grpo/SmolLM2-135M-Instruct.Q4_1.gguf

The file of the model is the one that training_scripts/quickstart.sh has fetched.
"""

import random
import re
from collections.abc import Iterator

from hybrid_grpo.data.tasks import Row, TaskRecipe

RULES = "You keep a running total. After each number, answer with the new total and nothing else."
LIMIT = 70
"""Tokens of a history after which it is compacted."""


def numbers(held_out: bool) -> Iterator[Row]:
    """Four numbers; those of held-out rows add up to an even total, and others to an odd one."""
    draw = random.Random(0)
    while True:
        found = [draw.randint(1, 9) for _ in range(4)]
        if (sum(found) % 2 == 0) == held_out:
            yield {"numbers": found}


def row(row: Row) -> Row:
    return {"prompt": [{"role": "system", "content": RULES}], "numbers": row["numbers"]}


async def adds(task, client):
    """The share of totals that are right."""

    async def ask(chat):
        reply = await client.chat.completions.create(model="policy", messages=chat, max_tokens=12)
        return reply.choices[0].message.content, reply.usage.total_tokens

    chat, right, total = list(task["prompt"]), 0, 0
    for number in task["numbers"]:
        total += number
        chat.append({"role": "user", "content": f"Add {number}."})
        said, tokens = await ask(chat)
        chat.append({"role": "assistant", "content": said})
        right += re.findall(r"\d+", said)[-1:] == [str(total)]
        if tokens > LIMIT:
            chat.append({"role": "user", "content": "Note in one line what you need to go on."})
            notes, _ = await ask(chat)
            chat = [*task["prompt"], {"role": "user", "content": f"Your notes: {notes}"}]
    return right / len(task["numbers"])


totals = TaskRecipe(
    row=row,
    made=numbers,
    settings={"data": {"limit": 2048, "eval_split": "test", "eval_limit": 64}, "rewards": []},
)
