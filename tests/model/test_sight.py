"""Models that see, against transformers alone: one family after another, tiny and random."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from seeing import FAMILIES
from sight_proof import PROMPTS, prove_rounding, prove_sight
from tiny_architectures import tiny_architecture

from hybrid_grpo.data.pictures import ImageStore
from hybrid_grpo.model.sight import VisionEncoder
from hybrid_grpo.model.towers import TOWERED
from hybrid_grpo.model.visual_tokens import keys_of, visual_tokens, whole_before, whole_until

ROUNDED = {"qwen3_5": 5e-4, "gemma4": 5e-4}
"""Relative gaps of gradients where float32 rounds more. From gradients in float64, those of Qwen3.5 are 2.5e-4 off,
transformers' own 8e-5; of Gemma 4 1e-4, transformers' own 3.4e-4."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_sees_decodes_and_learns_as_transformers_computes_it(name, tmp_path):
    gaps, sight = prove_sight(name, tmp_path)
    assert not gaps.faults(ROUNDED.get(name, 1e-5))
    shown = {id(part) for parts in PROMPTS for part in parts if not isinstance(part, str)}
    assert len(shown) == 4
    assert sight.runs == 4, "once for each picture in sampling and training together"


@pytest.mark.parametrize("name", ROUNDED)
def test_where_float32_rounds_more_gradients_are_as_exact_as_those_of_transformers(name, tmp_path):
    gaps, own = prove_rounding(name, tmp_path)
    assert 1e-5 < own < 1e-4 and not gaps.faults(1.5 * own)


class Toy(torch.nn.Module):
    """A tower of one layer, which makes two embeddings of a picture, and what is added deeper."""

    config = SimpleNamespace(model_type="toy", get_text_config=lambda decoder: None)

    def __init__(self):
        super().__init__()
        self.base_model = SimpleNamespace(get_image_features=self.features)
        self.layer = torch.nn.Linear(3, 4, bias=False)

    def features(self, pixels, return_dict):
        rows = self.layer(pixels)
        return SimpleNamespace(pooler_output=[rows], deepstack_features=[[rows * rows]])


def toy_pixels(key):
    return {"pixels": torch.arange(6.0).view(2, 3) + key}


BYTES = 4 * 2 * (2 * 4)
"""Of what the toy makes of a picture."""


@pytest.mark.parametrize("seed", range(4))
def test_the_latest_looks_are_kept(seed):
    """Against a list of the pictures that were looked at."""
    draw, tower = random.Random(seed), Toy()
    sight = VisionEncoder(tower, toy_pixels, torch.device("cpu"), 3 * BYTES + 5)
    kept, runs = [], 0
    for _ in range(60):
        runs, kept = runs + ((key := draw.randrange(5)) not in kept), [*(k for k in kept if k != key), key][-3:]
        look, rows = sight.look(key), tower.layer(toy_pixels(key)["pixels"])
        assert torch.equal(look.rows_ND, rows) and torch.equal(look.deep[0], rows * rows)
    assert sight.runs == runs
    large = VisionEncoder(tower, toy_pixels, torch.device("cpu"), 1)
    assert [large.look(k).rows_ND[0, 0].item() for k in (1, 1, 2)] and large.runs == 2, "one that is too large is kept"


@pytest.mark.parametrize("name", TOWERED)
def test_every_model_with_a_tower_has_an_album_also_if_it_is_trained_on_text_alone(name):
    album = ImageStore.of("nowhere", tiny_architecture(name))
    assert album is not None and album.empty


def test_pictures_are_read_whole_and_told_apart():
    one, two = visual_tokens(5, 3), visual_tokens(2**45 - 1, 2)
    tokens = [7, *one, 8, *two, *one[:2], 9, one[2], 4]
    assert keys_of(tokens) == [5, 2**45 - 1, 5] and all(token < 0 for token in one + two)
    assert [whole_until(tokens, end) for end in (0, 1, 2, 3, 4, 6, 8, 10, 11)] == [0, 1, 4, 4, 4, 7, 11, 11, 11]
    assert [whole_before(tokens, end) for end in (0, 1, 2, 3, 4, 6, 8, 10, 11)] == [0, 1, 1, 1, 4, 5, 7, 7, 11]
    assert np.array(two).dtype == np.int64
