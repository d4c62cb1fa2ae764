"""Mixes several sources into one stream of prompts: how many prompts of each source a step draws, and which ones.

The weights alone decide how many prompts; chance and the number of ranks play no part. Each source decides by its own
seeded epochs which prompts are drawn.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_grpo.config import MixtureConfig
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.data.loader import PromptLoader

Choose = Callable[[NDArray[np.int64], int, int], list[tuple[int, int]]]


class Mixture:
    """One stream of prompts for each source, with the number of prompts drawn from it.

    Args:
        sources: the sources with their weights.
        prompts: the prompts of all sources; prompts of one source are contiguous.
        seed, shuffle: see `PromptLoader`. The order within a source depends on its name, not on the other sources.
    """

    def __init__(self, sources: Sequence[MixtureConfig], prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        total = sum(Fraction(str(source.weight)) for source in sources)
        self._weights = [Fraction(str(source.weight)) / total for source in sources]
        self._streams: dict[str, PromptLoader[int]] = {}
        self._indices: dict[str, NDArray[np.int64]] = {}
        for source in sources:
            own = [number for number, prompt in enumerate(prompts) if prompt.source == source.name]
            self._indices[source.name] = np.array(own)
            of_source = zlib.crc32(f"{seed} {source.name}".encode())
            self._streams[source.name] = PromptLoader(own, 1, 0, 1, of_source, shuffle)

    def take(self, count: int, choose: Choose | None = None) -> list[tuple[int, int]]:
        """Return the indices and epochs of the next `count` prompts, with the sources interleaved about evenly.

        Args:
            choose: overrides the order within a source: returns the prompts to draw, given the indices of the source's
                prompts, how many to draw, and how many were drawn before.
        """
        drawn = [stream.position for stream in self._streams.values()]
        placed = []
        for own, had, (name, stream) in zip(
            quotas(self._weights, drawn, count), drawn, self._streams.items(), strict=True
        ):
            in_order = stream.draw(own, range(own))
            items = in_order if choose is None else choose(self._indices[name], own, had)
            placed += [((place + 0.5) / own, item) for place, item in enumerate(items)]
        return [item for _, item in sorted(placed, key=lambda pair: pair[0])]

    def state_dict(self) -> dict[str, Any]:
        """For each source by name: the position of its stream."""
        return {name: stream.state_dict() for name, stream in self._streams.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position; sources that it lacks begin at their start."""
        for name in self._streams.keys() & state.keys():
            self._streams[name].load_state_dict(state[name])


def quotas(weights: Sequence[Fraction], drawn: Sequence[int], count: int) -> list[int]:
    """Return how many of the next `count` items come from each source.

    The number is the source's weight times `count`, rounded down or up. It is rounded up for the sources that are
    furthest below their share of all draws (largest remainder method).

    Args:
        weights: weights of the sources, 1 in total.
        drawn: items drawn from each source so far.
    """
    exact = [weight * count for weight in weights]
    numbers = [math.floor(share) for share in exact]
    owed = [
        weight * (sum(drawn) + count) - had - number
        for weight, had, number in zip(weights, drawn, numbers, strict=True)
    ]
    between = [i for i, share in enumerate(exact) if share != numbers[i]]
    for i in sorted(between, key=lambda i: (-owed[i], i))[: count - sum(numbers)]:
        numbers[i] += 1
    return numbers
