"""The rewards that environments give, in addition to the rewards of functions."""

from __future__ import annotations

from functools import partial

from hybrid_grpo.data.batch import RewardStep
from hybrid_grpo.data.episodes import Episode
from hybrid_grpo.rewards.functions import RewardValue
from hybrid_grpo.rewards.loader import Reward
from hybrid_grpo.rewards.scorer import EPISODES
from hybrid_grpo.workers.calls import Call, Failure, Interface, Reply
from hybrid_grpo.workers.pool import call_inline


def rewards_of(names: list[str], *, by_turn: bool) -> list[Reward]:
    """Return a reward of weight 1 for each of these names. A reward does not apply to completions of other
    environments, or if the environment gave none; it fails if the environment failed.

    Args:
        by_turn: whether rewards of turns stay rewards of steps; otherwise they are added up.
    """
    interface = Interface([], [EPISODES], False, "group")
    return [
        Reward(name, 1.0, frozenset(), interface, partial(call_inline, partial(_score, name, by_turn)))
        for name in dict.fromkeys(names)
    ]


def _score(name: str, by_turn: bool, call: Call) -> Reply:
    episodes: list[Episode | None] = call.inputs[EPISODES]
    own = [episode if episode is not None and episode.reward == name else None for episode in episodes]
    return Reply(
        [_value(episode, length, by_turn) for episode, length in zip(own, call.expected, strict=True)],
        [Failure("invalid", e.failure) if e is not None and e.failure is not None else None for e in own],
    )


def _value(episode: Episode | None, length: int, by_turn: bool) -> RewardValue:
    if episode is None or episode.failure is not None:
        return None
    steps: list[RewardStep] = list(episode.steps)
    if steps and by_turn:
        ends = dict(steps)
        if episode.total is not None:
            ends[length] = ends.get(length, 0.0) + episode.total
        return sorted(ends.items())
    earned = [reward for _, reward in steps] + ([] if episode.total is None else [episode.total])
    return sum(earned) if earned else None
