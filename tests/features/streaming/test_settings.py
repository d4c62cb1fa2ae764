"""What a stream of prompts does not go with, whichever of the two features says so."""

import pytest

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.building import build
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.features import feature_sections

NEEDING_ALL = {
    "curriculum": {"sampling": "difficulty"},
    "teacher": {"prompt_column": "solved"},
    "guests": {"writers": [{"name": "g", "weight": "baseline", "path": "train.jsonl"}]},
}


@pytest.mark.parametrize("name", NEEDING_ALL)
def test_features_that_need_all_prompts_refuse_a_stream(name):
    if name not in feature_sections():
        pytest.skip(f"there is no feature {name}")
    given = {"data": {"path": "x.jsonl"}, "rewards": ["exact_match"], "streaming": {"enabled": True}}
    with pytest.raises(UserError, match=r"streaming .*take out one of the two"):
        build(TrainConfig, {**given, name: NEEDING_ALL[name]})
