"""How a model reads tokens: where the pictures among them are placed, and which sidecars its training forward takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hybrid_grpo.model.attention import Blocks
from hybrid_grpo.model.logprobs import DistinctTargets
from hybrid_grpo.model.routing import Replay, Routing
from hybrid_grpo.model.sidecars import Piece, TokenRow, find
from hybrid_grpo.model.sight import ImageInputs, VisionEncoder
from hybrid_grpo.model.support import MaskColumns
from hybrid_grpo.model.visual_tokens import whole_before, whole_until


@dataclass(frozen=True)
class Reading:
    """How a model reads tokens. By default it is a model of texts that has no experts, or whose routers choose again.

    Attributes:
        sight: sees the pictures; None if there are none.
        replays: whether recorded experts are used again in training, or only compared; None if none are recorded.
    """

    sight: VisionEncoder | None = None
    replays: bool | None = None

    @property
    def sees(self) -> bool:
        """Whether there may be pictures."""
        return self.sight is not None

    @property
    def has_offsets(self) -> bool:
        """Whether positions may differ from the numbers of tokens before them."""
        return self.sight is not None and self.sight.axes > 1

    def positions(self, tokens: Sequence[int]) -> tuple[np.ndarray, int]:
        """Return the positions of a text's tokens on each axis, [axes, tokens], and the position after them; there is
        one axis if the text has no pictures. See `VisionEncoder.positions`."""
        if self.sight is None or self.sight.axes == 1 or not any(token < 0 for token in tokens):
            return np.arange(len(tokens))[None], len(tokens)
        return self.sight.positions(tokens)

    def offset(self, tokens: Sequence[int]) -> int:
        """Return how far positions after a text are ahead of its number of tokens; below 0 after most pictures."""
        return self.positions(tokens)[1] - len(tokens)

    def blocks(self, tokens: Sequence[int]) -> Blocks | None:
        """Return the runs of picture tokens that attend to themselves in both directions; None if there are none."""
        if self.sight is None or self.sight.both_ways is None:
            return None
        is_seen = np.array(tokens, dtype=np.int64) < 0
        edges = np.flatnonzero(np.diff(is_seen, prepend=False, append=False)).reshape(-1, 2)
        runs = [(int(begin), int(end - begin)) for begin, end in edges]
        return Blocks(runs, windows_only=self.sight.both_ways == "windows") if runs else None

    def shown(self, tokens: Sequence[int], device: torch.device) -> ImageInputs | None:
        """Return the pictures in the flat tokens of a forward; None if there are none."""
        return None if self.sight is None else self.sight.shown(tokens, device)

    def whole_until(self, tokens: Sequence[int], end: int) -> int:
        """Return `end`, or the end of the picture that it would divide: its tokens may attend to each other."""
        return end if self.sight is None else whole_until(tokens, end)

    def alike(self, one: TokenRow, other: TokenRow, tokens: int) -> int:
        """Return how many of the first `tokens` of two rows, which are the same, may be computed once for both."""
        known = [np.concatenate(of.arrays())[:tokens] for row in (one, other) if (of := find(row.sidecars, Routing))]
        differs = (known[0] != known[1]).any((1, 2)) if self.replays and len(known) == 2 else np.zeros(1)
        return whole_before(one.ids, int(differs.argmax())) if differs.any() else tokens

    def sidecars(
        self, rows: Sequence[TokenRow], pieces: Sequence[Piece], tokens: Sequence[int], source_N: np.ndarray,
        target_N: np.ndarray, device: torch.device,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return what a training forward of `tokens`, which are those of pieces of rows, takes beside them. `source_N`:
        the place of the token before each target."""
        columns = MaskColumns.of(rows, target_N, device) if any(row.sidecars for row in rows) else None
        distinct = DistinctTargets.of(source_N, target_N, device) if columns is None else None
        replay = None if self.replays is None else Replay.of(pieces, self.replays, device)
        return tuple(each for each in (columns, distinct, replay, self.shown(tokens, device)) if each is not None)


TEXT = Reading()
"""Reads texts alone."""


def joined_positions(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join positions of texts, [axes, tokens] each, to [axes, 1, tokens], or [1, tokens] if all have one axis."""
    axes = max(map(len, parts))
    joined = np.concatenate([np.broadcast_to(part, (axes, part.shape[1])) for part in parts], axis=1)
    return joined if axes == 1 else joined[:, None]
