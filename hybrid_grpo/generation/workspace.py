"""Memory that decoding keeps between calls."""

from collections.abc import Callable
from typing import Any

from hybrid_grpo.config import RolloutConfig
from hybrid_grpo.generation.cache import PagedCache
from hybrid_grpo.generation.decoder import Decoder
from hybrid_grpo.generation.graphs import Capture, bytes_of
from hybrid_grpo.generation.paged_attention import PAGE
from hybrid_grpo.generation.sampler import Sampling
from hybrid_grpo.model.architectures import cached_numbers

_SHARE = 0.1
"""Fraction of a GPU's memory that the cache of a model beside the policy may take, or what one sequence needs."""


class Workspace:
    """The cache, slots and CUDA graphs of one model, kept from call to call of `generate`.

    The first call allocates memory for `slots` completions at a time, each of at most `tokens` tokens including its
    prompt, and captures all graphs. Only a longer sequence allocates again, and graphs are captured again only if
    weights have moved or the last capture failed. On a CPU, where nothing is captured, nothing is kept.
    """

    def __init__(self, slots: int, tokens: int) -> None:
        self.slots, self.tokens = slots, tokens
        self._decoder: Decoder | None = None
        self._weights: list[int] = []

    def decoder(
        self, model: Any, sampling: Sampling, longest: int, new_cache: Callable[[list[int], int], PagedCache],
        capture: Capture, *, has_offsets: bool,
    ) -> Decoder:  # fmt: skip
        """Return the decoder for a call whose longest sequence has `longest` tokens, with all pages and slots free.
        `new_cache` makes a cache, given the lengths of the sequences and the number of slots; for `has_offsets`, the
        same in every call, see `Decoder`."""
        if longest > self.tokens:
            # The memory is given back first: the new cache may need it.
            self.tokens, self._decoder = longest, None
        kept, weights = self._decoder, [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
        if kept is not None and kept.captured and weights == self._weights:
            kept.cache.clear()
            kept.begin(sampling)
            return kept
        cache = kept.cache if kept else new_cache([self.tokens] * self.slots, self.slots)
        # The memory of the old graphs is given back before the new ones take theirs.
        self._decoder = kept = None
        cache.clear()
        decoder = Decoder(
            model, cache, sampling, cache.slots, cache.pages_for(self.tokens), capture, has_offsets=has_offsets
        )
        decoder.capture_all()
        self._decoder, self._weights = decoder, weights
        return decoder


def workspace_beside(
    config: RolloutConfig, model_config: Any, dtype: str, rows: int, tokens: int, device_bytes: int
) -> tuple[Workspace, int]:
    """Return a workspace for a model that generates beside the policy, and the bytes that it takes on a GPU.

    It is kept from call to call: graphs are captured once, and the policy's cache cannot take its memory. It holds
    `rows` sequences of `tokens` tokens, or as many as its share of the GPU's `device_bytes` allows.
    """
    itemsize = 2 if dtype == "bfloat16" else 4
    pages, page_bytes = -(-tokens // PAGE) + 1, PAGE * cached_numbers(model_config) * itemsize
    share = int(_SHARE * device_bytes) // max(1, pages * page_bytes)
    slots = max(1, min(rows, config.max_slots, share))
    graphs = bytes_of(slots) + slots * model_config.get_text_config().vocab_size * itemsize
    taken = (slots * pages + 2) * page_bytes + graphs if config.decoder == "paged" else 0
    return Workspace(slots, tokens), taken
