"""The fallback: completions by transformers' `generate()`, slower, for architectures that the decode loop refuses.

Only the forwards and the cache are transformers'. Tokens, log-probabilities and endings come from the same sampler and
the same random streams as in loop.py. Only prompts of the same length are decoded together, without padding, which
some recurrent layers do not ignore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hybrid_grpo.data.batch import Completion
from hybrid_grpo.generation import scheduler
from hybrid_grpo.generation.loop import OnFinish, Request, Stats, sequences_of
from hybrid_grpo.generation.sampler import Sampler, Sampling


class _Choice(LogitsProcessor):
    """Samples the next tokens, then leaves them as the only ones that `generate()` can choose."""

    def __init__(
        self, rows: list[scheduler.Sequence], sampler: Sampler, record: Callable[[scheduler.Sequence, int, float], None]
    ) -> None:
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
            # A row that has ended is decoded on with the others; its further tokens are dropped.
            if not row.done:
                self.record(row, token, logp)
        return torch.full_like(logits_nV, float("-inf")).scatter_(1, token_n[:, None], 0.0)


class _Ends(StoppingCriteria):
    """Tells `generate()` which rows have ended."""

    def __init__(self, rows: list[scheduler.Sequence]) -> None:
        self.rows = rows

    def __call__(self, ids_nS: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor([row.done for row in self.rows], device=ids_nS.device)


@contextmanager
def _no_defaults(model: Any) -> Iterator[None]:
    """Inside, the model has an empty generation config: its own would add stop tokens, penalties and forbidden tokens
    that nobody asked for."""
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
    on_finish: OnFinish | None = None,
    decode: Callable[[list[int]], str] | None = None,
) -> tuple[list[list[Completion]], Stats]:
    """Complete every request, as `generate` in loop.py does; see there for what is not described here.

    Args:
        model: any transformers causal language model in eval mode, with one of transformers' own attention
            implementations and without hooks that communicate.
        max_slots: most completions decoded at the same time; fewer where fewer prompts have the same length.
    """
    device, stats = next(model.parameters()).device, Stats()
    sampler = Sampler(sampling, device)
    finished: list[list[Completion | None]] = [[None] * len(request.keys) for request in requests]

    def record(row: scheduler.Sequence, token: int, logp: float) -> None:
        stats.rows += 1
        stats.context += len(row.tokens)
        if completion := row.add(token, logp, sampling, decode):
            finished[row.request][row.sample] = completion
            if on_finish is not None:
                on_finish(row.request, row.sample, completion)

    # Longest prompts first, so that a lack of memory shows at once.
    rows = [row for group in sequences_of(requests, sampling) for row in group]
    rows.sort(key=lambda row: row.prompt, reverse=True)
    with _no_defaults(model):
        for _, alike in groupby(rows, key=lambda row: row.prompt):
            while batch := list(islice(alike, max_slots)):
                choice = _Choice(batch, sampler, record)
                model.generate(
                    torch.tensor([row.tokens for row in batch], device=device),
                    generation_config=GenerationConfig(max_new_tokens=max(row.limit for row in batch), do_sample=False),
                    logits_processor=LogitsProcessorList([choice]),
                    stopping_criteria=StoppingCriteriaList([_Ends(batch)]),
                    # Each rank decodes at its own pace.
                    synced_gpus=False,
                )
                stats.steps += choice.steps
                stats.prefills += len(batch)
    return [[c for c in group if c is not None] for group in finished], stats
