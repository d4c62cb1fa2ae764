"""Settings of a teacher that are refused, and those that are not."""

import pytest
from refusals import TWO, refusal

from hybrid_grpo.config import TrainConfig, build

ALONE = {"rollout": {"num_generations": 1}, "teacher": {"model": "m"}}
MIXTURE = {"mixture": [{"path": "maths.jsonl"}, {"path": "code.jsonl"}]}
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
    (
        {"teacher": {"model": "m", "divergence": "forward_kl"}},
        "teacher.divergence forward_kl has no effect with teacher.into advantage: set teacher.into to loss",
    ),
    (
        {"teacher": {"model": "m", "into": "loss", "jsd_beta": 0.1}},
        "teacher.jsd_beta 0.1 has no effect with teacher.divergence reverse_kl: set it to jsd",
    ),
    ({"teacher": {"model": "m", "into": "loss", "jsd_beta": 1.0}}, "teacher.jsd_beta 1.0 must be in (0, 1)"),
    ({"teacher": {"model": "m", "clamp": 0.0}}, "teacher.clamp 0.0 must be greater than 0"),
    (
        {"teacher": {"prompt_column": "solved", "other_tokenizer": True}},
        "teacher.other_tokenizer true has no effect if the policy itself is the teacher: set teacher.model",
    ),
    (
        {"teacher": {"model": "m", "other_tokenizer": True, "into": "loss"}},
        "teacher.other_tokenizer compares the texts of single turns, and teacher.into loss compares whole vocabularies",
    ),
    (
        {"teacher": {"model": "m", "other_tokenizer": True}, "rollout": {"user": "f.py:g"}},
        "teacher.other_tokenizer compares the texts of single turns, and rollout.user makes completions of several",
    ),
    (
        {"teacher": {"model": "m", "other_tokenizer": True}, "rollout": {"logprobs": "mask", "top_p": 0.9}},
        "teacher.other_tokenizer compares the texts of single turns, and rollout.logprobs mask compares tokens that",
    ),
    (
        {"teacher": {"by_source": {"maths": "m"}}},
        "teacher.by_source maths is not a source of data.mixture",
    ),
    (
        {"teacher": {"by_source": {"math": "m"}}, "data": MIXTURE},
        "teacher.by_source math is not a source of data.mixture: did you mean maths?",
    ),
    (
        {"teacher": {"by_source": {"maths": "m"}}, "data": MIXTURE},
        "teacher.by_source has no teacher for source code: name one, or set teacher.model",
    ),
    (
        {"teacher": {"by_source": {"maths": "m", "code": "n"}, "model": "o"}, "data": MIXTURE},
        "teacher.model o teaches nothing, since teacher.by_source names a teacher for every source: take one of",
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
    {"teacher": {"model": "m", "into": "loss", "divergence": "jsd", "jsd_beta": 0.1, "clamp": 3.0}},
    {"teacher": {"by_source": {"maths": "m"}, "prompt_column": "solved"}, "data": MIXTURE},
    {"teacher": {"by_source": {"maths": "m", "code": "n"}, "other_tokenizer": True}, "data": MIXTURE},
    # The teacher alone teaches the other source.
    {"teacher": {"model": "m"}, "data": MIXTURE, "rewards": [{"function": "exact_match", "sources": ["maths"]}]},
])  # fmt: skip
def test_teachers_that_mean_something_are_not(settings):
    assert build(TrainConfig, {"rewards": TWO, **settings}).teacher.is_on
