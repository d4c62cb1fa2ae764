"""The reward of the countdown task (countdown_task.py): for whole expressions, or token by token."""

from __future__ import annotations

from functools import cache
from itertools import pairwise, permutations, product

from hybrid_grpo.rewards.countdown import evaluate

SIGNS = "+-*"


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


def solved(
    completions: list[str],
    completion_ids: list[list[int]],
    nums: list[list[int]],
    target: list[int],
    *,
    steps: bool = False,
) -> list[float | list[tuple[int, float]]]:
    """1.0 if the completion is one of the `expressions` with the value `target`, else 0.0.

    With `steps` every token is a step. Before the last token, the return is 1 while some right expression begins with
    the text so far, and else 0. A token's reward is its change of the return, and the sum is the reward of the whole.
    The tokenizer must have one token for each character.
    """
    rewards: list[float | list[tuple[int, float]]] = []
    for text, ids, numbers, goal in zip(completions, completion_ids, nums, target, strict=True):
        right = expressions(tuple(sorted(numbers))).get(goal, set())
        if not steps:
            rewards.append(float(text in right))
            continue
        values = [float(any(each.startswith(text[:end]) for each in right)) for end in range(1, len(ids))]
        values.append(float(text in right))
        changes = [now - before for before, now in pairwise([0.0, *values])]
        rewards.append(list(enumerate(changes, 1)))
    return rewards
