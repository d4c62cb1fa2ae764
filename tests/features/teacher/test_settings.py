"""Settings of a teacher that are refused, and those that are not."""

import pytest
from refusals import TWO, refusal

from hybrid_grpo.config import TrainConfig, build

ALONE = {"rollout": {"num_generations": 1}, "teacher": {"model": "m"}}
REFUSED = [
    ({"teacher": {"coef": 0.5}}, "teacher.coef 0.5 has no effect without a teacher: set teacher.model or teacher.prom"),
    ({"teacher": {"into": "loss"}}, "teacher.into loss has no effect without a teacher: set teacher.model or"),
    ({"teacher": {"model": "m", "coef": 0.0}}, "teacher.coef 0.0 must be greater than 0"),
    (
        {"teacher": {"model": "m", "top_k": 8}},
        "teacher.top_k 8 has no effect with teacher.into advantage: set teacher.",
    ),
    (
        {"teacher": {"prompt_column": "solved", "offload": False}},
        "teacher.offload false has no effect if the policy itself is the teacher: set teacher.model",
    ),
    ({"teacher": {"prompt_column": "prompt"}}, "teacher.prompt_column prompt is data.prompt_column, which the policy"),
    ({**ALONE, "grpo": {"scale_rewards": "none"}}, "grpo.scale_rewards none is about rewards in a group, and rollout."),
    ({**ALONE, "grpo": {"dynamic_sampling": True}}, "grpo.dynamic_sampling true is about rewards in a group"),
    (
        {**ALONE, "grpo": {"beta": 0.1, "kl_in": "reward"}},
        "grpo.kl_in reward is about rewards in a group, and rollout.num_generations 1 makes none",
    ),
]


@pytest.mark.parametrize("settings, says", REFUSED, ids=[says[:40] for _, says in REFUSED])
def test_teachers_that_mean_nothing_are_refused(settings, says):
    assert refusal(rewards=TWO, **settings).startswith(says)


@pytest.mark.parametrize("settings", [
    ALONE,
    {"teacher": {"prompt_column": "solved", "into": "loss", "top_k": 64}},
])  # fmt: skip
def test_teachers_that_mean_something_are_not(settings):
    assert build(TrainConfig, {**settings, "rewards": TWO}).teacher.is_on
