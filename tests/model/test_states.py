"""Layers with a state in packed rows: each sequence gives what it gives alone, its gradients too."""

import random

import pytest
import torch
from tiny_models import STATES, VOCABULARY, pair

from hybrid_grpo.model.attention import Segments
from hybrid_grpo.model.states import install_state_functions

CPU = torch.device("cpu")
PACKINGS = 3
"""Random packings of each architecture."""


def draw(rng):
    """Up to 9 texts of 1 to 80 tokens, and the number of the one that each continues; -1 for none."""
    lengths = [rng.choice((1, 2, 3, 7, rng.randint(1, 80))) for _ in range(rng.randint(1, 9))]
    return [([rng.randrange(VOCABULARY) for _ in range(n)], rng.randint(-1, k - 1)) for k, n in enumerate(lengths)]


def packed(texts):
    """The tokens, positions and segments of one row, and for each text the places of all that it continues and of its
    own."""
    tokens, positions, own, places = [], [], [], []
    for text, parent in texts:
        own.append((len(tokens), len(text)))
        above = places[parent] if parent >= 0 else []
        places.append([*above, *range(len(tokens), len(tokens) + len(text))])
        tokens += text
        positions += range(len(above), len(places[-1]))
    return tokens, positions, Segments.of_tree(own, [parent for _, parent in texts], CPU), places


@pytest.mark.parametrize("architecture", STATES)
def test_packings_of_any_kind_leak_nothing(architecture):
    plain, view = pair(architecture)
    install_state_functions(view)
    for seed in range(PACKINGS):
        tokens, positions, segments, places = packed(draw(random.Random(seed)))
        given = {"input_ids": torch.tensor([tokens]), "position_ids": torch.tensor([positions]), "use_cache": False}
        found_SD = view.base_model(**given, batch=segments).last_hidden_state[0]
        weight_SD = torch.randn(found_SD.shape, generator=torch.Generator().manual_seed(seed))
        expected_SD = torch.full_like(found_SD, float("nan"))
        for read in places:
            ids = torch.tensor([[tokens[place] for place in read]])
            hidden = plain.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
            expected_SD = expected_SD.index_copy(0, torch.tensor(read), hidden)
        scale = expected_SD.abs().max()
        assert (found_SD - expected_SD).abs().max() < 2e-5 * scale, seed
        plain.zero_grad()
        view.zero_grad()
        (found_SD * weight_SD).sum().backward()
        (expected_SD * weight_SD).sum().backward()
        largest = max(float(p.grad.norm()) for p in plain.parameters() if p.grad is not None)
        for (name, mine), theirs in zip(view.named_parameters(), plain.parameters(), strict=True):
            if theirs.grad is not None:
                gap = float((mine.grad - theirs.grad).norm()) / max(float(theirs.grad.norm()), 1e-2 * largest)
                assert gap < 2e-4, (seed, name, gap)
