"""The fallback for architectures that the decode loop refuses: transformers' `generate()`, which is slower.

transformers provides only the forwards and the cache. The sampler chooses tokens, with the same random streams as in
loop.py, and completions end by the same rules. Only texts of equal length are decoded together, since some recurrent
layers do not ignore padding. After each answer between turns, the model reads the whole text again.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from hybrid_grpo.data.batch import Completion
from hybrid_grpo.generation.loop import PATIENCE_S, Stats
from hybrid_grpo.generation.sampler import Sampler, Sampling, to_lists
from hybrid_grpo.generation.sequence import Callbacks, Request, Sequence, sequences_of


@contextmanager
def _no_defaults(model: Any) -> Iterator[None]:
    # The model's own generation config would add stop tokens, penalties and forbidden tokens.
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


class _Batches:
    """The state of one call of `generate`, which decodes rows in batches."""

    def __init__(self, model: Any, sampling: Sampling, callbacks: Callbacks) -> None:
        self.model, self.sampling, self.callbacks = model, sampling, callbacks
        self.device, self.stats = next(model.parameters()).device, Stats()
        self.sampler = Sampler(sampling, self.device)

    def decode(self, rows: list[Sequence]) -> None:
        """Decode every row to the end of its turn. All rows must have the same number of tokens."""
        key_n = self._integers(row.key for row in rows)

        def ended(*_: Any, **__: Any) -> Tensor:
            return torch.tensor([row.waits or row.completion is not None for row in rows], device=self.device)

        self.model.generate(
            torch.tensor([row.tokens for row in rows], device=self.device),
            generation_config=GenerationConfig(
                max_new_tokens=max(row.turn_end - len(row.tokens) for row in rows), do_sample=False
            ),
            logits_processor=LogitsProcessorList([partial(self._choose, rows, key_n)]),
            stopping_criteria=StoppingCriteriaList([ended]),
            # Each rank decodes at its own pace.
            synced_gpus=False,
        )

    def _choose(self, rows: list[Sequence], key_n: Tensor, ids_nS: Tensor, logits_nV: Tensor) -> Tensor:
        """Sample the next tokens, and return logits that make `generate()` choose them."""
        if self.callbacks.on_step:
            self.callbacks.on_step()
        seen_nV = None
        if self.sampler.needs_seen:
            seen_nV = torch.zeros_like(logits_nV, dtype=torch.bool).scatter_(1, ids_nS, True)
        chosen = self.sampler(logits_nV, key_n, self._integers(len(row.logp) for row in rows), seen_nV)
        self.stats.steps += 1
        for row, token, logp, kept in zip(rows, *to_lists(chosen), strict=True):
            # A row that has ended keeps being decoded with the others; its further tokens are dropped.
            if not (row.completion or row.waits):
                self.stats.rows += 1
                self.stats.context += len(row.tokens)
                row.add(token, logp, kept, self.sampling, self.callbacks)
        return torch.full_like(logits_nV, float("-inf")).scatter_(1, chosen[0][:, None], 0.0)

    def answered(self, rows: list[Sequence]) -> list[Sequence]:
        """Wait for the answers to all rows, and return the rows that begin another turn."""
        waiting = {row.key: row for row in rows}
        while self.callbacks.turns is not None and waiting:
            if self.callbacks.on_step:
                self.callbacks.on_step()
            for key, observation in self.callbacks.turns.answers(PATIENCE_S):
                assert isinstance(key, int), "only the paged decoder begins sequences"
                row = waiting.pop(key)
                finish = row.answer(observation)
                if finish is not None:
                    row.end(finish, self.callbacks)
        return [row for row in rows if row.completion is None]

    def _integers(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self.device)


def generate(
    model: Any, requests: list[Request], sampling: Sampling, callbacks: Callbacks | None = None, *, max_slots: int = 256
) -> tuple[list[list[Completion]], Stats]:
    """Complete every request as `generate` in loop.py does; see there for the other arguments and the result.

    Args:
        model: any transformers causal language model in eval mode, with one of transformers' own attention
            implementations and without hooks that communicate.
        max_slots: most completions that are decoded at the same time; only texts of equal length are decoded together.
    """
    callbacks = callbacks or Callbacks()
    batches = _Batches(model, sampling, callbacks)
    groups = sequences_of(requests, sampling, callbacks.reading)
    if callbacks.turns is not None:
        callbacks.turns.begin(requests)
    todo = [row for group in groups for row in group]
    with _no_defaults(model):
        while todo:
            # Longest texts first, so that a lack of memory shows at once.
            todo.sort(key=lambda row: -len(row.tokens))
            batches.stats.prefills += len(todo)
            # As lists made at once, because the rows grow.
            for alike in [list(rows) for _, rows in groupby(todo, key=lambda row: len(row.tokens))]:
                for first in range(0, len(alike), max_slots):
                    batches.decode(alike[first : first + max_slots])
            todo = batches.answered([row for row in todo if row.waits])
    return [[row.completion for row in group if row.completion] for group in groups], batches.stats
