"""One policy, two players: it plays Nim against itself and learns from both sides, each compared with its own.

A pile is a letter, `a` for one stone and `l` for twelve, and so is a move, `a` to `c`. On held-out rows a player that
draws its moves replies, and the reward is the share of games that the policy wins: from 0 to 0.94 in 300 steps. The
command is in examples/README.md.
"""

import random
from itertools import count

from hybrid_grpo.data.tasks import Row, TaskRecipe

LETTERS = "abcdefghijkl"
PLAYERS = ("first", "second")


def piles(held_out: bool):
    for number in count():
        yield {"stones": 1 + number % len(LETTERS), "game": number, "draws": held_out}


def row(row: Row) -> Row:
    return {"prompt": [{"role": "user", "content": LETTERS[row["stones"] - 1]}], **row}


async def plays(task, client):
    """Who takes the last stone wins. Who takes what is not there loses, and the other wins nothing."""
    stones, draw = task["stones"], random.Random(task["game"])
    for turn in count():
        player, other = PLAYERS[turn % 2], PLAYERS[1 - turn % 2]
        most = min(3, stones)
        if task["draws"] and player == "second":
            taken = draw.randint(1, most)
        else:
            pile = [{"role": "user", "content": LETTERS[stones - 1]}]
            reply = await client.chat.completions.create(model=player, messages=pile, max_tokens=2)
            taken = 1 + "abc"[:most].find(reply.choices[0].message.content or "?")
            if not taken:
                return 0.0 if task["draws"] else {player: -1.0}
        stones -= taken
        if stones == 0:
            won = {player: 1.0, other: 0.0} if turn else {player: 1.0}
            return float(player == "first") if task["draws"] else won


nim = TaskRecipe(
    row=row,
    made=piles,
    settings={"data": {"limit": 1200, "eval_split": "test", "eval_limit": 120}, "rewards": []},
)
