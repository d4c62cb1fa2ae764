"""The support of a sampled token: the tokens that the sampler's filters left, among which it was drawn.

`SamplingMask` is the record that goes from the sampler to the loss with a completion. `MaskColumns` is what the output
head computes from it, so that it normalizes over the same tokens ("keep sampling mask", DeepSeek-V3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from hybrid_grpo.model.sidecars import TokenRow, find
from hybrid_grpo.model.upload import upload

_HIDDEN = -1e6
"""Logit of a token outside the support: its probability is exactly 0. Kernels compute the exponential of its rounding
error, and soft caps its square, and multiply them by 0: both must be finite."""
_GATHER_BITS = 0x0102040810204080
"""Multiplied by eight bytes that are 0 or 1, it has them as the bits of its highest byte, the first byte lowest."""


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The token ids among which each of N tokens was drawn, that token included."""

    id_K: np.ndarray
    """int32, the ids of the first token in ascending order, then those of the second, and so on."""
    count_N: np.ndarray
    """int32, the number of ids of each token."""
    name: ClassVar = "support"

    @classmethod
    def of(cls, ids: Sequence[np.ndarray]) -> Self:
        """Return the support of tokens, given the ascending ids of each."""
        return cls(np.concatenate(ids).astype(np.int32), np.array(list(map(len, ids)), np.int32))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the support of the tokens of all parts, in order."""
        return cls(np.concatenate([part.id_K for part in parts]), np.concatenate([part.count_N for part in parts]))

    def lists(self) -> list[np.ndarray]:
        """Return the ids of each token; undoes `of`."""
        return np.split(self.id_K, np.cumsum(self.count_N)[:-1])

    def part(self, sampled: slice, read: slice) -> Self:
        return self.of(self.lists()[sampled])

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.id_K, self.count_N

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingMask) and all(map(np.array_equal, self.arrays(), other.arrays()))


def packed(kept_nV: Tensor) -> Tensor:
    """Pack booleans into bits, uint8 [n, V / 8 rounded up], the lowest bit first. Nothing waits for the device."""
    eights = torch.nn.functional.pad(kept_nV, (0, -kept_nV.shape[1] % 8)).view(torch.int64)
    return (eights * _GATHER_BITS >> 56).to(torch.uint8)


def unpacked(bits_nW: np.ndarray) -> list[np.ndarray]:
    """Return the places of the bits that `packed` has set in each row, ascending, int32."""
    place = np.flatnonzero(bits_nW)
    at, bit = np.unpackbits(bits_nW.reshape(-1, 1)[place], axis=1, bitorder="little").nonzero()
    row, byte = np.divmod(place[at], bits_nW.shape[1])
    return np.split((8 * byte + bit).astype(np.int32), np.searchsorted(row, np.arange(1, len(bits_nW))))


class MaskColumns:
    """The columns of an output head that are in the support of any of N tokens, on the device.

    Attributes:
        id_U: int64, the ids of these tokens, ascending.
        target_N: int64, the index in `id_U` of each of the N tokens.
    """

    def __init__(self, support: SamplingMask, target_N: np.ndarray, device: torch.device) -> None:
        count_V = np.bincount(support.id_K)
        place_V = np.cumsum(count_V > 0, dtype=np.int32) - 1
        self.id_U, self.target_N = upload(np.flatnonzero(count_V), device), upload(place_V[target_N], device)
        # By column, so that those of a tile are together.
        self._column_K, order = upload(place_V[support.id_K], device).sort(stable=True)
        self._row_K = upload(np.repeat(np.arange(len(target_N), dtype=np.int32), support.count_N), device)[order]
        self._ends = np.concatenate([[0], np.cumsum(count_V[count_V > 0])])

    @classmethod
    def of(cls, rows: Sequence[TokenRow], target_N: np.ndarray, device: torch.device) -> Self | None:
        """Return the columns for the targets of rows; None, for the whole vocabulary, if a row has no mask."""
        masks = [mask for row in rows if (mask := find(row.sidecars, SamplingMask)) is not None]
        return cls(SamplingMask.joined(masks), target_N, device) if len(masks) == len(rows) else None

    def hide(self, logits: Tensor, rows: slice, columns: slice) -> Tensor:
        """Overwrite the logits of a tile at tokens outside the support of its rows; `columns` are indices in `id_U`."""
        inside, height = slice(self._ends[columns.start], self._ends[columns.stop]), len(logits)
        row = self._row_K[inside] - rows.start
        # Those of other rows go to one more row: leaving them out would wait for the device.
        row = torch.where((row >= 0) & (row < height), row, height)
        outside = torch.ones(height + 1, logits.shape[1], dtype=torch.bool, device=logits.device)
        outside.index_put_((row, self._column_K[inside] - columns.start), outside.new_zeros(()))
        return logits.masked_fill_(outside[:-1], _HIDDEN)
