"""Names of other frameworks: each is answered with a setting that exists, and pages show recipes that port makes."""

import re

import pytest
from paths import ROOT

from hybrid_grpo.commands.port import port
from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.commands import SftConfig
from hybrid_grpo.config.composition import setting_names
from hybrid_grpo.config.foreign_names import conversions, foreign_name, foreign_names
from hybrid_grpo.config.parsing import configure, parse
from hybrid_grpo.config.recipes import load_yaml
from hybrid_grpo.records.files import flattened
from hybrid_grpo.records.metrics.catalogue import CATALOGUE

BY_HAND = {"rewards", "data.prompt_column", "data.chat_template", "grpo.kl_unbiased"}
NAMES = setting_names(TrainConfig)
ALL_NAMES = {*NAMES, *setting_names(SftConfig)}
WITH = {
    "grpo.kl_estimator": ["--grpo.beta", "0.1", "--grpo.kl_in", "reward"],
    "grpo.kl_in": ["--grpo.beta", "0.1"],
    "grpo.ref_every": ["--grpo.beta", "0.1"],
    "grpo.ref_mix": ["--grpo.beta", "0.1", "--grpo.ref_every", "1"],
    **{name: ["--lora.rank", "8"] for name in ("lora.target_modules", "lora.load_in_4bit")},
}
"""What a setting needs beside it."""


def test_every_name_leads_to_a_setting_that_exists_and_is_not_one_of_ours():
    for framework, names in foreign_names().items():
        for theirs, ours in names.items():
            assert theirs not in NAMES, theirs
            known = ours.startswith("nothing") or "`" in ours or ours.split(" ")[0] in NAMES
            assert known, f"{framework}: {theirs} is said to be {ours}"


def test_values_formulas_and_defaults_are_of_names_that_exist():
    theirs = {name for names in foreign_names().values() for name in names} | {"alpha_by_rank"}
    tables = conversions()
    for name, values in tables["values"].items():
        assert name in NAMES or name in theirs, name
        for value, became in values.items():
            settings = became if isinstance(became, dict) else {name: became} if name in NAMES else {}
            assert settings.keys() <= set(NAMES), (name, value)
            for setting, part in settings.items():
                parse(TrainConfig, [f"--{setting}", str(part), *WITH.get(setting, [])], "train")
    for ours, formulas in tables["formulas"].items():
        assert ours == "processes" or ours in ALL_NAMES
        used = {name for text in formulas for name in re.findall(r"[A-Za-z_][\w.]*", text)}
        assert used <= theirs | {"processes", "rows", "steps", "prompts_per_step", "batch_size"}
    assert all(names.keys() <= theirs for names in tables["defaults"].values())
    assert tables["defaults"].keys() == foreign_names().keys() - {"DeepSpeed-Chat", "An older recipe"}


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/coming-from/[!R]*.md")), ids=lambda page: page.stem)
def test_a_page_shows_the_recipe_that_port_makes_of_their_script(page, tmp_path):
    (language, theirs), (_, ours) = re.findall(r"```(python|bash|yaml)\n(.*?)```", text := page.read_text(), re.S)
    (file := tmp_path / f"theirs.{'py' if language == 'python' else 'sh'}").write_text(theirs)
    yamls = (configure(TrainConfig, load_yaml(recipe)).yaml for recipe in (port(file), ours))
    ported, recipe = (dict(flattened(load_yaml(yaml))) for yaml in yamls)
    assert {name for name in recipe if ported[name] != recipe[name]} <= BY_HAND
    assert set(re.findall(r"\|`([^`]+)`\|$", text, re.M)) <= {metric.name for metric in CATALOGUE}


def test_a_command_without_the_setting_does_not_suggest_it():
    assert foreign_name("num_generations", ["policy.lr"]) is None
    assert foreign_name("grpo.temperature", NAMES, whole=True) is None
