"""Completions by transformers' own `generate()`: slower, for architectures that the decode loop refuses.

Only the forwards and their cache are transformers'. Tokens, log-probabilities and endings are made here, by the same
sampler and from the same random streams as in loop.py. Prompts of one length are decoded together, so there is no
padding, which not every recurrent layer ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hybrid_grpo.data.batch import Completion
from hybrid_grpo.generation.loop import OnFinish, Request, Stats
from hybrid_grpo.generation.sampler import Sampler, Sampling, text_ends


@dataclass
class _Row:
    """One completion on its way."""

    request: int
    sample: int
    prompt_ids: list[int]
    key: int
    limit: int
    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    completion: Completion | None = None

    @property
    def completed(self) -> Completion:
        assert self.completion is not None, "`generate()` decodes every row to its end"
        return self.completion


class _Choice(LogitsProcessor):
    """Takes the place of every processor of logits: chooses the next tokens, and leaves nothing else to choose."""

    def __init__(self, rows: list[_Row], sampler: Sampler, record: Callable[[_Row, int, float], None]) -> None:
        self.rows = rows
        self.sampler = sampler
        self.record = record
        self.steps = 0

    def __call__(self, ids_nS: Tensor, logits_nV: Tensor) -> Tensor:
        keys = [row.key for row in self.rows]
        key_n = torch.tensor(keys, dtype=torch.int64, device=logits_nV.device)
        seen_nV = None
        if self.sampler.needs_seen:
            seen_nV = torch.zeros_like(logits_nV, dtype=torch.bool).scatter_(1, ids_nS, True)
        token_n, logp_n = self.sampler(logits_nV, key_n, torch.full_like(key_n, self.steps), seen_nV)
        self.steps += 1
        for row, token, logp in zip(self.rows, token_n.tolist(), logp_n.tolist(), strict=True):
            # A row that has ended is decoded on with the others, for nothing.
            if row.completion is None:
                self.record(row, token, logp)
        return torch.full_like(logits_nV, float("-inf")).scatter_(1, token_n[:, None], 0.0)


class _Ends(StoppingCriteria):
    """Which rows have ended."""

    def __init__(self, rows: list[_Row]) -> None:
        self.rows = rows

    def __call__(self, ids_nS: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor([row.completion is not None for row in self.rows], device=ids_nS.device)


class _Run:
    """One call of `generate`."""

    def __init__(
        self,
        model: Any,
        sampling: Sampling,
        on_finish: OnFinish | None,
        decode: Callable[[list[int]], str] | None,
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.sampling = sampling
        self.sampler = Sampler(sampling, self.device)
        self.on_finish = on_finish
        self.decode = decode
        self.stats = Stats()

    def complete(self, rows: list[_Row]) -> None:
        """Decode rows whose prompts are of one length, until all have ended."""
        choice = _Choice(rows, self.sampler, self._record)
        self.model.generate(
            torch.tensor([row.prompt_ids for row in rows], device=self.device),
            generation_config=GenerationConfig(max_new_tokens=max(row.limit for row in rows), do_sample=False),
            logits_processor=LogitsProcessorList([choice]),
            stopping_criteria=StoppingCriteriaList([_Ends(rows)]),
            # Ranks decode each at their own pace.
            synced_gpus=False,
        )
        self.stats.steps += choice.steps
        self.stats.prefills += len(rows)

    def _record(self, row: _Row, token: int, logp: float) -> None:
        self.stats.rows += 1
        self.stats.context += len(row.prompt_ids) + len(row.token_ids)
        row.token_ids.append(token)
        row.logp.append(logp)
        stopped = token in self.sampling.stop_ids or text_ends(row.token_ids, self.sampling, self.decode)
        if stopped or len(row.token_ids) >= row.limit:
            row.completion = Completion(row.token_ids, row.logp, "stop" if stopped else "length")
            if self.on_finish is not None:
                self.on_finish(row.request, row.sample, row.completion)


@contextmanager
def _no_defaults(model: Any) -> Iterator[None]:
    """Set the model's generation config aside, which would fill in all that is not given: its stop tokens, penalties
    and lists of forbidden tokens."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def generate(
    model: Any,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    max_slots: int = 256,
    prefill_tokens: int | None = None,
    cache_gb: float | None = None,
    on_finish: OnFinish | None = None,
    decode: Callable[[list[int]], str] | None = None,
) -> tuple[list[list[Completion]], Stats]:
    """Complete every request, as `generate` in loop.py does.

    Args:
        model: any transformers causal language model in eval mode, with an attention of transformers', without
            hooks that communicate.
        requests: prompts with a stream key for each completion.
        sampling: how tokens are chosen, and when a completion ends.
        max_slots: completions decoded at the same time; fewer where fewer prompts have the same length.
        prefill_tokens: without effect: every completion reads its prompt in one piece.
        cache_gb: without effect: transformers' caches have no bound.
        on_finish: called as soon as a completion is finished.
        decode: tokens to text; needed for `Sampling.stop_strings`.

    Returns:
        The completions in the order of `requests` and their keys (texts are left empty), and what it took.
    """
    assert all(request.prompt_ids and request.keys for request in requests), "a prompt has tokens, a request keys"
    groups = [_rows(index, request, sampling) for index, request in enumerate(requests)]
    run = _Run(model, sampling, on_finish, decode)
    with _no_defaults(model):
        # The longest first: if memory does not suffice, it shows at once.
        rows = sorted((row for group in groups for row in group), key=_length, reverse=True)
        for _, alike in groupby(rows, key=_length):
            same_length = list(alike)
            for first in range(0, len(same_length), max_slots):
                run.complete(same_length[first : first + max_slots])
    return [[row.completed for row in group] for group in groups], run.stats


def _length(row: _Row) -> int:
    return len(row.prompt_ids)


def _rows(index: int, request: Request, sampling: Sampling) -> list[_Row]:
    limits = [sampling.max_tokens] * len(request.keys) if request.limits is None else request.limits
    return [
        _Row(index, sample, request.prompt_ids, key, limit)
        for sample, (key, limit) in enumerate(zip(request.keys, limits, strict=True))
    ]
