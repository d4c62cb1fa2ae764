"""Runs of tokens that attend to each other in both directions, as those of pictures do in some models."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Spans = Sequence[tuple[int, int]]
"""(start, length) of each."""


@dataclass(frozen=True)
class Blocks:
    """Runs of a row's tokens that attend to each other in both directions, within a window too (Gemma 3,
    arXiv:2503.19786, section 2)."""

    runs: Spans
    """None crosses the end of a segment."""
    windows_only: bool
    """Whether they do so only in layers with a sliding window."""

    def parts(
        self, own: Spans, prefix: Spans, window: int, device: torch.device
    ) -> Iterator[tuple[slice, tuple[slice, slice], Tensor]]:
        """Yield for each block its tokens, the tokens whose keys it attends to, in two parts, and which of these each
        of its own may attend to, bool [block, keys]. For `own` and `prefix` see `Segments`; 0 means no `window`."""
        starts = [start for start, _ in own]
        for start, length in self.runs:
            number = bisect_right(starts, start) - 1
            begin, (before, count) = own[number][0], prefix[number]
            seen = slice(before, before + count), slice(begin, start + length)
            key = torch.arange(count + start + length - begin, device=device)
            query = torch.arange(count + start - begin, len(key), device=device)
            yield slice(start, start + length), seen, key > query[:, None] - (window or len(key))
