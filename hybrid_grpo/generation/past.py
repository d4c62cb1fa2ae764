"""Completions of the last epoch, which the next one repeats for a while if both draw from the same random streams."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from hybrid_grpo.generation.requests import Request
from hybrid_grpo.generation.sampler import stream_key
from hybrid_grpo.generation.sequence import Sequence
from hybrid_grpo.model.ranks import all_gather_objects, exchange_objects, rank

MOST_TOKENS = 1 << 26
"""Maximum number of tokens that a rank keeps, of 4 bytes each; beyond, those kept longest are dropped."""


class Past:
    """What was sampled last from each random stream that epochs share."""

    def __init__(self) -> None:
        self._texts: dict[int, np.ndarray] = {}
        """By stream, the tokens after the prompt; those kept longest first."""
        self._tokens = 0

    def with_streams(self, requests: list[Request], seed: int, device: torch.device) -> list[Request]:
        """Return the requests of a step with random streams that are functions of the prompt and the sample index, and
        take what was sampled last from these from the ranks that have it. Collective, on `device`.

        If the step draws a prompt more than once, as at the border of two epochs, each draw has streams of its own.
        """
        own = [((p.source, p.id), p.epoch, len(request.keys)) for request in requests if (p := request.prompt)]
        drawn = all_gather_objects(own)
        epochs: dict[tuple[str, int], set[int]] = {}
        for prompt, epoch, _ in (draw for draws in drawn for draw in draws):
            epochs.setdefault(prompt, set()).add(epoch)

        def streams(prompt: tuple[str, int], epoch: int, count: int) -> list[int]:
            number = sorted(epochs[prompt]).index(epoch)
            return [stream_key(seed, "epochs", *prompt, number, k) for k in range(count)]

        of_ranks = [[streams(*draw) for draw in draws] for draws in drawn]
        if len(of_ranks) > 1:
            sent = [self._take(stream for group in groups for stream in group) for groups in of_ranks]
            for texts in exchange_objects(sent, device):
                self._add(texts)
        return [replace(request, shared=shared) for request, shared in zip(requests, of_ranks[rank()], strict=True)]

    def keep(self, groups: Iterable[list[Sequence]]) -> None:
        """Keep what was sampled from shared streams for the next epoch."""
        for sequence in (s for group in groups for s in group):
            completion = sequence.completion
            if sequence.shared is not None and completion is not None and completion.finish != "open":
                self._add({sequence.shared: np.array(sequence.tokens[sequence.prompt :], dtype=np.int32)})

    def text(self, sequence: Sequence) -> list[int]:
        """Return a sequence's prompt and what was sampled last from its random stream; nothing if that is unknown."""
        text = None if sequence.shared is None else self._texts.get(sequence.shared)
        return [] if text is None else sequence.tokens[: sequence.prompt] + text.tolist()

    def _take(self, streams: Iterable[int]) -> dict[int, np.ndarray]:
        taken = {stream: self._texts.pop(stream) for stream in streams if stream in self._texts}
        self._tokens -= sum(map(len, taken.values()))
        return taken

    def _add(self, texts: dict[int, np.ndarray]) -> None:
        self._take(texts)
        self._texts |= texts
        self._tokens += sum(map(len, texts.values()))
        while self._tokens > MOST_TOKENS:
            self._take([next(iter(self._texts))])
