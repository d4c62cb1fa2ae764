"""Keys and values: of prompts that were just read, and of the sequences that are being decoded.

Both classes are what transformers calls `past_key_values`: a layer hands its new keys and values to `update`
and attends over what comes back.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LENGTH_STEP = 64


class PrefixCache:
    """Keys and values of a batch of prompts, [rows, heads, length, head_dim] by layer."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Keep the layer's keys and values; they are all there is to attend to."""
        assert layer == len(self.keys)
        self.keys.append(key)
        self.values.append(value)
        return key, value

    def get_seq_length(self, layer: int = 0) -> int:
        """Nothing was there before."""
        return 0


class SlotCache:
    """Keys and values of the sequences in decoding: slot i holds sequence i, entry j its position j.

    The active sequences are always the slots 0 to n - 1. Length is allocated in steps as the longest
    sequence needs it, so memory follows what was produced and not what would have been allowed.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.length = 0
        self._positions_n = torch.empty(0, dtype=torch.int64)
        self._rows_n = torch.empty(0, dtype=torch.int64)

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` entries."""
        if length > self.length:
            # Growing by a quarter keeps the copies a constant share of the work.
            target = max(length, self.length + self.length // 4)
            self.length = -(-target // _LENGTH_STEP) * _LENGTH_STEP
            self.keys = [self._grown(key) for key in self.keys]
            self.values = [self._grown(value) for value in self.values]

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self.slots, old.shape[1], self.length, old.shape[3])
        new[:, :, : old.shape[2]] = old
        return new

    def insert(self, prefix: PrefixCache, rows: Tensor, first_slot: int) -> None:
        """Copy prompt `rows[i]` of a prefix into slot `first_slot + i`."""
        length = prefix.keys[0].shape[2]
        self.reserve(length)
        if not self.keys:
            # Zeros, not whatever was in memory: a masked entry still meets the value product as 0 * entry.
            self.keys = [k.new_zeros(self.slots, k.shape[1], self.length, k.shape[3]) for k in prefix.keys]
            self.values = [v.new_zeros(self.slots, v.shape[1], self.length, v.shape[3]) for v in prefix.values]
        slots = slice(first_slot, first_slot + len(rows))
        for mine, theirs in zip(self.keys + self.values, prefix.keys + prefix.values, strict=True):
            mine[slots, :, :length] = theirs[rows]

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` entries of slots `source` over slots `target`."""
        for tensor in self.keys + self.values:
            tensor[target, :, :length] = tensor[source, :, :length]

    def at(self, positions_n: Tensor, length: int) -> SlotCache:
        """Set where the next token of slots 0 to n - 1 goes; attention will read the first `length` entries."""
        self._positions_n = positions_n
        self._rows_n = torch.arange(len(positions_n), device=positions_n.device)
        self._read = length
        return self

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write one new entry per active slot; return views [n, heads, length, head_dim] of all entries."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self._rows_n, :, self._positions_n] = key[:, :, 0]
        values[self._rows_n, :, self._positions_n] = value[:, :, 0]
        active = slice(0, len(self._rows_n))
        return keys[active, :, : self._read], values[active, :, : self._read]

    def get_seq_length(self, layer: int = 0) -> int:
        """Asked for by transformers; positions are always given explicitly."""
        return self.length
