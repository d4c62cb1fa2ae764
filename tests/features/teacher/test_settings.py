"""Settings of a teacher that are refused, and those that are not."""

import pytest
from refusals import TWO

from hybrid_grpo.config import TrainConfig, build

ALONE = {"rollout": {"num_generations": 1}, "teacher": {"model": "m"}}
MIXTURE = {"mixture": [{"path": "maths.jsonl"}, {"path": "code.jsonl"}]}


@pytest.mark.parametrize("settings", [
    ALONE,
    {"teacher": {"prompt_column": "solved", "into": "loss", "top_k": 64}},
    {"teacher": {"model": "m", "into": "loss", "divergence": "jsd", "jsd_beta": 0.1, "clamp": 3.0}},
    {"teacher": {"by_source": {"maths": "m"}, "prompt_column": "solved"}, "data": MIXTURE},
    {"teacher": {"by_source": {"maths": "m", "code": "n"}}, "data": MIXTURE},
    # The teacher alone teaches the other source.
    {"teacher": {"model": "m"}, "data": MIXTURE, "rewards": [{"function": "exact_match", "sources": ["maths"]}]},
])  # fmt: skip
def test_teachers_that_mean_something_are_not(settings):
    assert build(TrainConfig, {"rewards": TWO, **settings}).teacher.is_on
