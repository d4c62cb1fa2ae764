"""Reward functions of your own: completions should end early and hold no letter twice.

    python -m hybrid_grpo train --config examples/tiny.yaml --data.path runs/letters-task/train.jsonl \
        --rewards '[{function: examples/own_reward.py:ends}, {function: examples/own_reward.py:distinct, weight: 0.5}]'

A function is given lists with one element per completion, and every column of the data that it names. It returns one
number per completion, or None where it does not apply.
"""


def ends(completions: list[str], completion_ids: list[list[int]], **columns: object) -> list[float]:
    """1 for an empty completion, falling to 0 at eight tokens."""
    return [1.0 - min(len(ids), 8) / 8 for ids in completion_ids]


def distinct(completions: list[str], **columns: object) -> list[float | None]:
    """The share of different letters; an empty completion has none to look at."""
    return [len(set(text)) / len(text) if text else None for text in completions]
