"""Rewards of objectives.py, for whole completions or token by token.

Token by token, the return is 1 while some right text begins with the completion so far, and else 0; at the last token
it is the reward of the whole completion. A token's reward is its change of the return, so the sum is the reward of the
whole, and the token after which no right text is left pays for it. The tokenizer must have one token for each
character.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from itertools import pairwise, permutations, product

from hybrid_grpo.rewards.countdown import evaluate

SIGNS = "+-*"

Reward = float | list[tuple[int, float]]
"""Of a completion, or of its tokens: their ends and rewards."""


def exact(
    completions: list[str], completion_ids: list[list[int]], answer: list[str], *, steps: bool = False
) -> list[Reward]:
    """1.0 if the completion equals the column `answer`, else 0.0."""
    rows = zip(completions, completion_ids, answer, strict=True)
    return [_reward(text, len(ids), [right], steps) for text, ids, right in rows]


def solved(
    completions: list[str],
    completion_ids: list[list[int]],
    nums: list[list[int]],
    target: list[int],
    *,
    steps: bool = False,
) -> list[Reward]:
    """1.0 if the completion is one of the `expressions` of `nums` with the value `target`, else 0.0."""
    rows = zip(completions, completion_ids, nums, target, strict=True)
    return [
        _reward(text, len(ids), expressions(tuple(sorted(numbers))).get(goal, ()), steps)
        for text, ids, numbers, goal in rows
    ]


def _reward(text: str, tokens: int, right: Collection[str], steps: bool) -> Reward:
    whole = float(text in right)
    if not steps:
        return whole
    returns = [float(any(each.startswith(text[:end]) for each in right)) for end in range(1, tokens)]
    return list(enumerate((now - before for before, now in pairwise([0.0, *returns, whole])), 1))


@cache
def expressions(nums: tuple[int, ...]) -> dict[int, set[str]]:
    """All expressions without parentheses that use every number once, by their value."""
    found: dict[int, set[str]] = {}
    for order, signs in product(sorted(set(permutations(nums))), product(SIGNS, repeat=len(nums) - 1)):
        text = str(order[0]) + "".join(f"{sign}{number}" for sign, number in zip(signs, order[1:], strict=True))
        value = evaluate(text)
        assert value is not None
        found.setdefault(int(value[0]), set()).add(text)
    return found
