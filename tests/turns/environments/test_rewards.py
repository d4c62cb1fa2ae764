"""Rewards of environments, from what their episodes say."""

from hybrid_grpo.data.episodes import Episode
from hybrid_grpo.distributed.workers.calls import Call
from hybrid_grpo.rewards.scorer import EPISODES
from hybrid_grpo.turns.environments.environments import _score

EPISODES_OF_A_STEP = [
    Episode("game", ((3, 1.0), (5, 0.25)), 0.5), Episode("game", ((3, 1.0), (7, 0.25)), 0.5), Episode("game", (), 2.0),
    Episode("game"), Episode("other", (), 3.0), Episode("game", ((3, 1.0),), 0.5, failure="is gone"), None,
]  # fmt: skip


def test_the_reward_of_the_whole_comes_with_the_last_token_or_is_added_up():
    call = Call({EPISODES: EPISODES_OF_A_STEP}, [7] * len(EPISODES_OF_A_STEP))
    by_turn, together = (_score("game", by_turn, call) for by_turn in (True, False))
    assert by_turn.values == [[(3, 1.0), (5, 0.25), (7, 0.5)], [(3, 1.0), (7, 0.75)], 2.0, None, None, None, None]
    assert together.values == [1.75, 1.75, 2.0, None, None, None, None]
    assert [failure and failure.message for failure in together.failures] == [None] * 5 + ["is gone", None]
