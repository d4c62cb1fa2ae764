"""The device's part of decoding: one row of state for every sequence, and the step that advances all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.generation.attention import Step
from hybrid_grpo.generation.cache import PagedCache
from hybrid_grpo.generation.sampler import Sampler, Sampling
from hybrid_grpo.generation.scheduler import Sequence

_TOKEN, _POSITION, _COUNT, _KEY = range(4)


class Decoder:
    """Slots of sequences on the device; the active ones are slots 0 to n - 1.

    Args:
        model: see `generate`.
        cache: its keys and values.
        sampling: how tokens are chosen.
        slots: most sequences at a time.
        width: most pages of a sequence.
    """

    lag = 0
    """Steps that are under way while the next one is prepared: the host reads their tokens later."""

    def __init__(self, model: Any, cache: PagedCache, sampling: Sampling, slots: int, width: int) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.keys[0].device
        self.sampler = Sampler(sampling, self.device)
        self._state_4n = torch.zeros(4, slots, dtype=torch.int64, device=self.device)
        self._table_nw = torch.zeros(slots, width, dtype=torch.int32, device=self.device)
        self._seen_nV: Tensor | None = None
        if self.sampler.needs_seen:
            vocabulary = model.get_output_embeddings().weight.shape[0]
            self._seen_nV = torch.zeros(slots, vocabulary, dtype=torch.bool, device=self.device)

    def insert(self, first: int, sequences: list[Sequence]) -> None:
        """Put sequences into the slots from `first` on."""
        state = [
            [s.tokens[-1] for s in sequences],
            [s.position for s in sequences],
            [len(s.logp) for s in sequences],
            [s.key for s in sequences],
        ]
        slots = slice(first, first + len(sequences))
        self._state_4n[:, slots] = torch.tensor(state, dtype=torch.int64).to(self.device)
        width = self._table_nw.shape[1]
        rows = [s.pages + [0] * (width - len(s.pages)) for s in sequences]
        self._table_nw[slots] = torch.tensor(rows, dtype=torch.int32).to(self.device)
        if self._seen_nV is not None:
            for slot, sequence in enumerate(sequences, first):
                self._seen_nV[slot] = False
                self._seen_nV[slot, torch.tensor(sequence.tokens, device=self.device)] = True

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy the state of slots `source` over slots `target`."""
        if not source:
            return
        self._state_4n[:, target] = self._state_4n[:, source]
        self._table_nw[target] = self._table_nw[source]
        if self._seen_nV is not None:
            self._seen_nV[target] = self._seen_nV[source]

    def step(self, active: list[Sequence]) -> Any:
        """Feed each active sequence its last token and sample the next; returns what `read` takes."""
        page = self.cache.page
        grown = [slot for slot, s in enumerate(active) if s.position % page == 0]
        if grown:
            columns = [active[slot].position // page for slot in grown]
            pages = [active[slot].pages[column] for slot, column in zip(grown, columns, strict=True)]
            self._table_nw[grown, columns] = torch.tensor(pages, dtype=torch.int32).to(self.device)
        longest = max(s.position for s in active) + 1
        return self._advance(len(active), self.cache.pages_for(longest))

    def _advance(self, n: int, read: int) -> tuple[Tensor, Tensor]:
        state_4n = self._state_4n[:, :n]
        position_n = state_4n[_POSITION].clone()
        batch = Step(self.cache, self._table_nw[:n], position_n, read)
        out = self.model(
            input_ids=state_4n[_TOKEN][:, None],
            position_ids=position_n[:, None],
            past_key_values=batch,
            use_cache=True,
            batch=batch,
        )
        seen_nV = None if self._seen_nV is None else self._seen_nV[:n]
        token_n, logp_n = self.sampler(out.logits[:, -1], state_4n[_KEY], state_4n[_COUNT], seen_nV)
        if seen_nV is not None:
            seen_nV.scatter_(1, token_n[:, None], True)
        state_4n[_TOKEN] = token_n
        state_4n[_POSITION : _COUNT + 1] += 1
        return token_n, logp_n

    def read(self, outcome: Any) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of a step, by slot."""
        token_n, logp_n = outcome
        return token_n.tolist(), logp_n.tolist()
