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
    """Prompts of 1 to 80 tokens with up to 4 completions of 1 to 80 tokens; some prompts alone."""

    def text():
        return [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 2, 3, 7, rng.randint(1, 80))))]

    return [(text(), [text() for _ in range(rng.randint(0, 4))]) for _ in range(rng.randint(1, 4))]


def packed(groups):
    """The tokens, positions and segments of one row, and for each sequence its places in the row."""
    tokens, positions, own, prefix, places = [], [], [], [], []
    for prompt, completions in groups:
        start = len(tokens)
        for text, before in ((prompt, 0), *((completion, len(prompt)) for completion in completions)):
            own.append((len(tokens), len(text)))
            prefix.append((start, before))
            read = [*range(start, start + before), *range(len(tokens), len(tokens) + len(text))]
            tokens += text
            positions += range(before, before + len(text))
            places.append(read)
    return tokens, positions, Segments(own, prefix, CPU), places


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
