"""The decode loop: prompts are read once for their group, finished sequences leave at once.

The last prompt token is not part of the prefill. It is the first token that a completion feeds to the decode
step, so all sampling happens in one place and a group shares its prefill without sharing any state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_grpo.data.batch import Completion
from hybrid_grpo.generation.cache import PrefixCache, SlotCache
from hybrid_grpo.generation.sampler import Sampling, sample

_READ_STEP = 32


@dataclass(frozen=True)
class Request:
    """A prompt and the completions wanted of it."""

    prompt_ids: list[int]
    """At least one token."""
    keys: list[int]
    """Random stream of each completion; see `stream_key`."""


@dataclass
class Stats:
    """What a call of `generate` did."""

    steps: int = 0
    """Forward passes of the decode loop."""
    rows: int = 0
    """Rows of those passes: one for each token sampled."""
    prefills: int = 0
    """Prompts read."""


@dataclass(frozen=True)
class _Waiting:
    """A completion whose prompt has been read."""

    request: int
    sample: int
    prefix: PrefixCache
    row: int


class _Slots:
    """Per-slot state of the sequences in decoding; the active ones are slots 0 to n - 1."""

    def __init__(self, slots: int, max_tokens: int, device: torch.device) -> None:
        self.owner: list[tuple[int, int]] = []
        self.token_n = torch.zeros(slots, dtype=torch.int64, device=device)
        self.position_n = torch.zeros(slots, dtype=torch.int64, device=device)
        self.count_n = torch.zeros(slots, dtype=torch.int64, device=device)
        self.key_n = torch.zeros(slots, dtype=torch.int64, device=device)
        self.max_tokens = max_tokens
        self.tokens_nT = torch.zeros(slots, 0, dtype=torch.int64, device=device)
        self.logp_nT = torch.zeros(slots, 0, dtype=torch.float32, device=device)
        self.longest = 0
        """Upper bound on the position of any active slot, kept on the host."""
        self.most = 0
        """Upper bound on the number of tokens of any active slot."""

    def __len__(self) -> int:
        return len(self.owner)

    def record(self, token_n: Tensor, logp_n: Tensor) -> None:
        """Append one sampled token to every active slot and make it the next input."""
        if self.most == self.tokens_nT.shape[1]:
            width = min(max(64, 2 * self.most), self.max_tokens)
            self.tokens_nT = nn.functional.pad(self.tokens_nT, (0, width - self.most))
            self.logp_nT = nn.functional.pad(self.logp_nT, (0, width - self.most))
        n = len(self)
        column = self.count_n[:n, None]
        self.tokens_nT[:n].scatter_(1, column, token_n[:, None])
        self.logp_nT[:n].scatter_(1, column, logp_n[:, None])
        self.token_n[:n] = token_n
        self.position_n[:n] += 1
        self.count_n[:n] += 1
        self.longest += 1
        self.most += 1

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the state of slots `source` over slots `target`."""
        for state in (self.token_n, self.position_n, self.count_n, self.key_n, self.tokens_nT, self.logp_nT):
            state[target] = state[source]


class _Loop:
    """One call of `generate`."""

    def __init__(
        self, model: Any, requests: Sequence[Request], sampling: Sampling, max_slots: int, prefill_tokens: int
    ) -> None:
        self.model = model
        self.requests = requests
        self.sampling = sampling
        self.prefill_tokens = prefill_tokens
        self.device = next(model.parameters()).device
        self.capacity = min(max_slots, sum(len(request.keys) for request in requests))
        self.pending = deque(range(len(requests)))
        self.waiting: deque[_Waiting] = deque()
        self.slots = _Slots(self.capacity, sampling.max_tokens, self.device)
        self.cache = SlotCache(self.capacity)
        self.stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=self.device)
        self.finished: list[list[Completion | None]] = [[None] * len(request.keys) for request in requests]
        self.stats = Stats()

    def run(self) -> list[list[Completion]]:
        while self.pending or self.waiting or len(self.slots):
            self._admit()
            self._retire(self._step())
        return [[c for c in group if c is not None] for group in self.finished]

    def _admit(self) -> None:
        """Fill the free slots, reading as many prompts as that takes."""
        while (free := self.capacity - len(self.slots)) and (self.pending or self.waiting):
            if not self.waiting:
                self._prefill(free)
            prefix = self.waiting[0].prefix
            batch: list[_Waiting] = []
            while self.waiting and self.waiting[0].prefix is prefix and len(batch) < free:
                batch.append(self.waiting.popleft())
            self._insert(prefix, batch)

    def _prefill(self, free: int) -> None:
        """Read the next prompts, together, until their completions fill `free` slots or the token budget."""
        batch: list[int] = []
        completions = width = 0
        while self.pending and completions < free:
            request = self.requests[self.pending[0]]
            wider = max(width, len(request.prompt_ids) - 1)
            if batch and wider * (len(batch) + 1) > self.prefill_tokens:
                break
            batch.append(self.pending.popleft())
            completions += len(request.keys)
            width = wider
        # Padding stands to the right, where no real token attends to it; what it leaves in the cache stands
        # behind its sequence and is overwritten as that grows. A prompt of one token is all padding.
        ids = torch.zeros(len(batch), max(width, 1), dtype=torch.int64)
        for row, index in enumerate(batch):
            prompt = self.requests[index].prompt_ids[:-1]
            ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        positions = torch.arange(ids.shape[1], device=self.device).expand(len(batch), -1)
        prefix = PrefixCache()
        self.model.base_model(
            input_ids=ids.to(self.device),
            position_ids=positions,
            past_key_values=prefix,
            use_cache=True,
            positions_nq=positions,
        )
        self.stats.prefills += len(batch)
        for row, index in enumerate(batch):
            for k in range(len(self.requests[index].keys)):
                self.waiting.append(_Waiting(index, k, prefix, row))

    def _insert(self, prefix: PrefixCache, batch: list[_Waiting]) -> None:
        """Start decoding completions whose prompt has been read."""
        slots, first = self.slots, len(self.slots)
        prompts = [self.requests[w.request].prompt_ids for w in batch]
        new = slice(first, first + len(batch))
        self.cache.insert(prefix, torch.tensor([w.row for w in batch], device=self.device), first)
        slots.token_n[new] = torch.tensor([ids[-1] for ids in prompts], device=self.device)
        slots.position_n[new] = torch.tensor([len(ids) - 1 for ids in prompts], device=self.device)
        slots.count_n[new] = 0
        slots.key_n[new] = torch.tensor(
            [self.requests[w.request].keys[w.sample] for w in batch], dtype=torch.int64, device=self.device
        )
        slots.owner += [(w.request, w.sample) for w in batch]
        slots.longest = max(slots.longest, *(len(ids) - 1 for ids in prompts))

    def _step(self) -> Tensor:
        """Sample one token for every active slot; return which slots are finished, bool [n]."""
        slots, n = self.slots, len(self.slots)
        self.cache.reserve(slots.longest + 1)
        read = min(-(-(slots.longest + 1) // _READ_STEP) * _READ_STEP, self.cache.length)
        positions = slots.position_n[:n, None]
        out = self.model(
            input_ids=slots.token_n[:n, None],
            position_ids=positions,
            past_key_values=self.cache.at(slots.position_n[:n].clone(), read),
            use_cache=True,
            positions_nq=positions,
        )
        token_n, logp_n = sample(out.logits[:, -1], self.sampling, slots.key_n[:n], slots.count_n[:n])
        slots.record(token_n, logp_n)
        self.stats.steps += 1
        self.stats.rows += n
        return torch.isin(token_n, self.stop_ids) | (slots.count_n[:n] >= self.sampling.max_tokens)

    def _retire(self, finished_n: Tensor) -> None:
        """Take out the finished sequences and close the gaps with the last ones."""
        done = finished_n.nonzero()[:, 0].tolist()
        if not done:
            return
        slots, n = self.slots, len(self.slots)
        for slot in done:
            request, k = slots.owner[slot]
            count = int(slots.count_n[slot])
            tokens = slots.tokens_nT[slot, :count].tolist()
            self.finished[request][k] = Completion(
                token_ids=tokens,
                logp=slots.logp_nT[slot, :count].tolist(),
                finish="stop" if tokens[-1] in self.sampling.stop_ids else "length",
            )
        left = n - len(done)
        gone = set(done)
        holes = [slot for slot in done if slot < left]
        movers = [slot for slot in range(left, n) if slot not in gone]
        if holes:
            source = torch.tensor(movers, device=self.device)
            target = torch.tensor(holes, device=self.device)
            self.cache.move(source, target, slots.longest)
            slots.move(source, target)
            for mover, hole in zip(movers, holes, strict=True):
                slots.owner[hole] = slots.owner[mover]
        del slots.owner[left:]
        slots.longest = int(slots.position_n[:left].max()) if left else 0
        slots.most = int(slots.count_n[:left].max()) if left else 0


@torch.inference_mode()
def generate(
    model: Any,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    max_slots: int = 256,
    prefill_tokens: int = 16384,
) -> tuple[list[list[Completion]], Stats]:
    """Complete every request.

    Args:
        model: a transformers causal language model in eval mode whose attention is `ATTENTION`, without
            hooks that communicate; nothing in here waits for another rank.
        requests: prompts with a stream key for each completion.
        sampling: how tokens are chosen, and when a completion ends.
        max_slots: completions decoded at the same time.
        prefill_tokens: padded prompt tokens of one prefill forward; a longer prompt goes alone.

    Returns:
        The completions in the order of `requests` and their keys (texts are left empty), and what it took.
    """
    assert all(request.prompt_ids and request.keys for request in requests), "a prompt has tokens, a request keys"
    loop = _Loop(model, requests, sampling, max_slots, prefill_tokens)
    return loop.run(), loop.stats
