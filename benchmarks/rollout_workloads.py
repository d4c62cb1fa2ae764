"""The workloads of rollout.py: prompts, and the length of each completion.

Log-normal lengths are not drawn: they are the quantiles (i + 1/2) / n of the distribution, shuffled by a seed. So the
longest completion, which decides how long engines without a scheduler take, does not depend on chance. Prompt lengths
are spread evenly over their range and shuffled; token ids are random.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import NormalDist


@dataclass(frozen=True)
class Workload:
    """P prompts with G completions each, every one of exactly the given length."""

    prompts: list[list[int]]
    """[P], token ids."""
    lengths: list[list[int]]
    """[P][G], tokens of each completion."""
    limit: int
    """The length limit of completions, to which an engine decodes that cannot end one earlier."""
    slots: int = 128
    """Completions decoded at the same time; engines without a queue take that many rows per call."""

    @property
    def rows(self) -> list[tuple[list[int], int]]:
        """[B], prompt and length of every completion, group after group."""
        return [(ids, n) for ids, group in zip(self.prompts, self.lengths, strict=True) for n in group]

    def shortened(self, factor: int) -> Workload:
        """The same workload with completions shorter by a factor, rounded up."""
        lengths = [[-(-n // factor) for n in group] for group in self.lengths]
        return Workload(self.prompts, lengths, -(-self.limit // factor), self.slots)


def _prompts(count: int, shortest: int, longest: int) -> list[list[int]]:
    random = Random(0)
    lengths = [shortest + round((longest - shortest) * i / max(count - 1, 1)) for i in range(count)]
    random.shuffle(lengths)
    # Below 512, so in the vocabulary of every model.
    return [random.choices(range(512), k=n) for n in lengths]


def _log_normal(count: int, limit: int, median: float = 50, sigma: float = 0.8) -> list[int]:
    normal = NormalDist(math.log(median), sigma)
    lengths = [round(math.exp(normal.inv_cdf((i + 0.5) / count))) for i in range(count)]
    lengths = [min(max(n, 1), limit) for n in lengths]
    Random(0).shuffle(lengths)
    return lengths


def _groups(lengths: list[int]) -> list[list[int]]:
    return [lengths[i : i + 8] for i in range(0, len(lengths), 8)]


def _ragged(limit: int) -> Workload:
    return Workload(_prompts(16, 24, 96), _groups(_log_normal(128, limit)), limit)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "ragged": lambda: _ragged(256),
    "tail": lambda: _ragged(1024),
    "uniform": lambda: Workload(_prompts(16, 24, 96), _groups([256] * 128), 256),
    "long_prompt": lambda: Workload(_prompts(16, 1024, 1024), _groups([64] * 128), 64),
    "one": lambda: Workload(_prompts(1, 60, 60), _groups([256] * 8), 256),
    "toy": lambda: Workload(_prompts(2, 4, 9), [[1, 4, 2, 8], [3, 8, 5, 2]], 8, 6),
    "nano_vllm": lambda: Workload(asked := _prompts(256, 100, 1024), [[len(ids)] for ids in asked[::-1]], 1024, 256),
    "gpu_ragged": lambda: Workload(_prompts(32, 128, 512), _groups(_log_normal(256, 1024, 300)), 1024, 256),
}
"""`gpu_ragged` is for the larger models, `nano_vllm` its own benchmark, by quantiles; `toy` shows that all runs."""

MAIN = ("ragged", "tail", "uniform", "long_prompt", "one")
"""The workloads meant by `all`."""
