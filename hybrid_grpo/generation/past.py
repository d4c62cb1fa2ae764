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

EPOCHS = 4
"""Number of epochs that share random streams. With the same in all of many epochs, less is learned; see docs/log.md."""
MOST_BYTES = 256 << 20
"""Maximum memory of the texts that a rank keeps; beyond, those kept longest are dropped."""
_BYTES_OF_A_TEXT = 250
"""Of an array and its place in a dict, beside 4 for each token."""


class Past:
    """What was sampled last from each random stream that epochs share."""

    def __init__(self) -> None:
        self._texts: dict[int, np.ndarray] = {}
        """By stream, the tokens after the prompt; those kept longest first."""
        self._bytes = 0
        self._step = -1
        self._drawn: dict[tuple[str, int, int], list[int]] = {}
        """By source, number and block of epochs, the epochs in which the step has drawn a prompt."""

    def with_streams(self, requests: list[Request], seed: int, step: int, device: torch.device) -> list[Request]:
        """Return requests of a step with random streams that are functions of the prompt and the sample index for
        `EPOCHS` epochs. What was sampled from these last moves here from the ranks that have it. Collective, on
        `device`.

        If a step draws a prompt more than once, as at the border of two epochs, each draw has streams of its own.
        """
        if step != self._step:
            self._step, self._drawn = step, {}
        own = [((p.source, p.id, p.epoch // EPOCHS), p.epoch, len(r.keys)) for r in requests if (p := r.prompt)]
        of_ranks = all_gather_objects(own)
        for prompt, epoch, _ in sorted({draw for draws in of_ranks for draw in draws}):
            if epoch not in (epochs := self._drawn.setdefault(prompt, [])):
                epochs.append(epoch)

        def streams(prompt: tuple[str, int, int], epoch: int, count: int) -> list[int]:
            number = self._drawn[prompt].index(epoch)
            return [stream_key(seed, "epochs", *prompt, number, k) for k in range(count)]

        wanted = [[streams(*draw) for draw in draws] for draws in of_ranks]
        if len(wanted) > 1:
            sent = [self._take(stream for group in groups for stream in group) for groups in wanted]
            for texts in exchange_objects(sent, device):
                self._add(texts)
        return [replace(request, shared=shared) for request, shared in zip(requests, wanted[rank()], strict=True)]

    def keep(self, groups: Iterable[list[Sequence]]) -> None:
        """Keep what was sampled from shared streams for the next epoch."""
        for sequence in (s for group in groups for s in group):
            if sequence.shared is not None and sequence.completion is not None:
                # Tokens of pictures, which are not sampled, are numbers of up to 63 bits below 0.
                tokens = np.array(sequence.tokens[sequence.prompt :], dtype=np.int64)
                self._add({sequence.shared: np.maximum(tokens, -1).astype(np.int32)})

    def text(self, sequence: Sequence) -> list[int]:
        """Return a sequence's prompt and what was sampled last from its random stream; nothing if that is unknown."""
        text = None if sequence.shared is None else self._texts.get(sequence.shared)
        return [] if text is None else sequence.tokens[: sequence.prompt] + text.tolist()

    def _take(self, streams: Iterable[int]) -> dict[int, np.ndarray]:
        taken = {stream: self._texts.pop(stream) for stream in streams if stream in self._texts}
        self._bytes -= _bytes_of(taken)
        return taken

    def _add(self, texts: dict[int, np.ndarray]) -> None:
        self._take(texts)
        self._texts |= texts
        self._bytes += _bytes_of(texts)
        while self._bytes > MOST_BYTES:
            self._take([next(iter(self._texts))])


def _bytes_of(texts: dict[int, np.ndarray]) -> int:
    return sum(_BYTES_OF_A_TEXT + text.nbytes for text in texts.values())
