"""Whether layers with a state take drafts: rows of one sequence in one step, each beginning with what the last left.

Kernels do that (see `model.kernels.states`), the functions of transformers do not, and which of them compute a layer
depends on its type, on the device and on the dtype. So a model is tested, as for fused steps.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch

from hybrid_grpo.generation.cache import PagedCache, Rows
from hybrid_grpo.generation.fused_step import TOLERANCE, fused_step
from hybrid_grpo.generation.paged_attention import decode_step

_WRONG = 1e3
"""What rows of drafts hold before; states of other rows are about 1."""

_agreed: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def states_take_drafts(model: Any, cache: PagedCache) -> bool:
    """Whether a sequence of a model may take several rows of a step, as far as its states go."""
    if not cache.states:
        return True
    if model not in _agreed:
        _agreed[model] = _agrees(model, cache)
    return _agreed[model]


@torch.inference_mode()
def _agrees(model: Any, like: PagedCache) -> bool:
    """Whether three tokens of a sequence in one step, beside a token of another one, give what they give in three."""
    width, device = like.pages_for(3), like.device
    apart, together = (PagedCache(like.geometry, 1 + 2 * width, like.page, device, 4, 4) for _ in range(2))
    table = torch.arange(1, 1 + 2 * width, dtype=torch.int32, device=device).view(2, width)
    generator = torch.Generator().manual_seed(0)
    states = [(state.kind, state.layer, state.index) for state in like.geometry.states]
    for name in states:
        noise = torch.randn(apart.states.of(*name).shape, generator=generator)
        apart.states.of(*name).copy_(noise)
        noise[2:] *= _WRONG
        together.states.of(*name).copy_(noise)

    def step(cache: PagedCache, tokens: list[int], rows: list[int], positions: list[int], nexts: list[int]) -> Any:
        token, at, position, next_ = torch.tensor([tokens, rows, positions, nexts], device=device)
        drafted = Rows(token, table[at], position, width, next_n=next_)
        fused = fused_step(model, cache)
        logits = decode_step(model, cache, drafted) if fused is None else fused(drafted)
        return logits.float().clone()

    logits = [*step(apart, [1, 2], [0, 1], [0, 0], [0, 0])]
    left = [[apart.states.of(*name)[row].float().clone() for row in (0, 1)] for name in states]
    for position, token in ((1, 3), (2, 1)):
        logits += step(apart, [token], [0], [position], [0])
        for name, rows in zip(states, left, strict=True):
            rows.append(apart.states.of(*name)[0].float().clone())
    found = [*step(together, [1, 2, 3, 1], [0, 1, 0, 0], [0, 0, 1, 2], [2, 0, ~3, ~0])]
    pairs = [*zip(found, logits, strict=True)]
    for name, rows in zip(states, left, strict=True):
        pairs += zip(together.states.of(*name).float(), rows, strict=True)
    bound = TOLERANCE[like.geometry.dtype]
    return all(bool((mine - own).norm() <= bound * own.norm()) for mine, own in pairs)
