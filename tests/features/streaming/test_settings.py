"""What a stream of prompts does not go with, whichever of the two features says so."""

import json

import pytest

from hybrid_grpo.config import EvaluateConfig, TrainConfig
from hybrid_grpo.config.building import build
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.features import feature_sections
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.data.sources import evaluation_source

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


def test_an_evaluation_reads_held_out_rows_as_the_run_did(tmp_path):
    """Of a recipe that streams, `eval` keeps just that: it does not download what was too large for training."""
    recipe = tmp_path / "config.yaml"
    given = {"data": {"path": "owner/name", "eval_split": "test"}, "rewards": ["exact_match"]}
    recipe.write_text(json.dumps({**given, "policy": {"model": "m"}, "streaming": {"enabled": True}}))
    config = parse(EvaluateConfig, ["--config", str(recipe)], "eval").config
    (feature,) = config.active_features
    source = evaluation_source(config.data)
    assert source is not None and feature.held_out_source(source, config.data).streaming
