"""Names of other frameworks: each is answered with a setting that exists, and the page says the same."""

import re

import pytest
from paths import ROOT

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.building import build
from hybrid_grpo.config.composition import setting_names
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.foreign_names import foreign_name, foreign_names
from hybrid_grpo.config.types import fields_of
from hybrid_grpo.records.metrics.catalogue import CATALOGUE

PAGE = (ROOT / "docs/coming-from.md").read_text()
NAMES = setting_names(TrainConfig)


def test_every_name_leads_to_a_setting_that_exists_and_is_not_one_of_ours():
    for framework, names in foreign_names().items():
        for theirs, ours in names.items():
            assert theirs not in NAMES, theirs
            known = ours.startswith("nothing") or "`" in ours or ours.split(" ")[0] in NAMES
            assert known, f"{framework}: {theirs} is said to be {ours}"


def test_the_page_has_the_same_settings_and_metrics_that_exist():
    frameworks = [name for name in foreign_names() if name != "An older recipe"]
    for framework, section in zip(frameworks, PAGE.split("\n## From ")[1:], strict=True):
        assert section.startswith(framework)
        settings, _, metrics = section.partition("| metric there")
        rows = dict(re.findall(r"^\| `(\S+)` \| (.+) \|$", settings, re.M))
        rows = {theirs: ours if " " in ours else ours.strip("`") for theirs, ours in rows.items()}
        assert foreign_names()[framework].items() <= rows.items()
        # What a feature that was taken out has left on the page is of no section.
        others = rows.keys() - foreign_names()[framework].keys()
        assert not any(rows[theirs].split(".")[0] in fields_of(TrainConfig) for theirs in others)
        assert set(re.findall(r"\| `([^`]+)` \|$", metrics, re.M)) <= {metric.name for metric in CATALOGUE}


@pytest.mark.parametrize(
    ("recipe", "answer"),
    [
        ({"num_generations": 8}, "TRL's num_generations is rollout.num_generations"),
        ({"grpo": {"kl_coef": 0.1}}, "verl's kl_coef is grpo.beta"),
        ({"actor_rollout_ref": {"rollout": {"n": 8}}}, "verl's actor_rollout_ref.rollout.n is rollout.num_generations"),
        ({"data": {"max_response_length": 8}}, "verl's data.max_response_length is rollout.max_completion_tokens"),
    ],
)
def test_a_recipe_of_another_framework_is_answered_in_our_words(recipe, answer):
    with pytest.raises(UserError, match=re.escape(answer)):
        build(TrainConfig, recipe)


def test_a_command_without_the_setting_does_not_suggest_it():
    assert foreign_name("num_generations", ["policy.lr"]) is None
    assert foreign_name("grpo.temperature", NAMES) is None
