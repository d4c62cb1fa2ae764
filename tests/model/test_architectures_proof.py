"""A fast selection of benchmarks/architectures.py, which does the same for every accepted type."""

import json
import sys

import pytest
from architecture_proof import prove
from paths import ROOT
from tiny_architectures import tiny_architecture

from hybrid_grpo.model.architectures import unsupported

sys.path.append(str(ROOT / "benchmarks"))

import architectures

SELECTION = [
    "afmoe",  # gated attention, no positions in some layers
    "apertus",  # an activation with weights
    "dbrx",  # noise on experts in a section of the configuration, clipped queries
    "exaone_moe",  # groups of experts, windows
    "gemma3",  # the text of a model that also takes images
    "glm4v_moe",  # positions with three axes, experts
    "gemma4_text, experts",  # head sizes by layer, values that are keys
    "gpt_neox",  # parallel attention and MLP, partial rotation
    "granitemoehybrid, attention only",  # a class that could keep a state
    "laguna",  # heads and rotary embeddings by kind of layer
    "mixtral",  # noise on the input of experts
    "olmo3",  # rotary embeddings by kind of layer
    "opt, projected",  # layers that training may skip, a projection before the head
]


@pytest.mark.parametrize("name", SELECTION)
def test_decoding_and_packed_training_are_those_of_transformers(name, tmp_path):
    assert unsupported(tiny_architecture(name)) is None
    assert not prove(name, tmp_path).faults(gradient=1e-4)


def test_a_model_that_is_computed_wrongly_is_found(tmp_path, monkeypatch):
    """The noise on the input of Mixtral's experts had stayed on in training."""
    monkeypatch.setattr("hybrid_grpo.model.loading.without_dropout", lambda config: config)
    faults = prove("mixtral", tmp_path).faults(gradient=1e-4)
    assert faults[0].startswith("log-probabilities in training are")


def test_the_page_lists_the_verdicts_that_were_measured():
    found = json.loads((ROOT / "benchmarks/results/architectures.json").read_text(encoding="utf-8"))
    assert found["counts"]["wrong"] == 0 and found["counts"]["accepted"] == found["counts"]["proven"] > 70
    page = architectures.PAGE.read_text(encoding="utf-8")
    assert page == architectures.replaced(page, architectures.lists(found), "architectures")
