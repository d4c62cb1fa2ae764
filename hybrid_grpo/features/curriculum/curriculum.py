"""Draws prompts. The success rate of each prompt is kept over the run, and the order of prompts may follow the rates.

With the default settings the rates have no effect: prompts are drawn as `StepLoader` draws them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.data.batch import Numbers, Prompt
from hybrid_grpo.data.loader import StepLoader, TrainingPrompts
from hybrid_grpo.distributed.ranks import all_reduce, rank
from hybrid_grpo.features.curriculum.settings import CurriculumConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CLASSES = 16
"""Number of classes of prompts by length; prompts of one class are expected to be about equally hard."""
MIN_TRIES = 4
"""Minimum number of completions, discounted by age, before a prompt is left out because of its success rate."""
HALF_LIFE = 50
"""Number of steps after which a completion counts half, since the policy has changed since it was sampled."""
FLOOR = 0.05
"""Weight of prompts that teach nothing or are left out, so that they are sometimes drawn; the best prompt has 1."""


@dataclass(frozen=True)
class RatedPrompts(TrainingPrompts):
    """Training prompts that are drawn by a `Curriculum`."""

    def loader(self, config: TrainConfig, plan: BatchPlan, device: torch.device) -> StepLoader:
        return Curriculum(self.prompts, config, plan, rank(), device)


class Curriculum(StepLoader):
    """Draws prompts, keeps their success rates and, if the settings say so, draws by these rates.

    The order and the rates are the same on every rank and for any number of ranks. Weighted draws are seeded by the
    position in the order. Within a step, prompts are drawn without replacement as long as any are left.
    """

    def __init__(
        self, prompts: Sequence[Prompt], config: TrainConfig, plan: BatchPlan, rank: int, device: torch.device
    ) -> None:
        super().__init__(prompts, config, plan, rank)
        self._config = config.of(CurriculumConfig)
        self._follows = self._config.follows
        self._device = device
        self._class_N = length_classes(prompts)
        self._count_N2 = np.zeros((len(prompts), 2), dtype=np.int64)
        self._recent_N2 = np.zeros((len(prompts), 2))
        self._weight_N: Floats | None = None
        self._drawn: list[tuple[int, int]] = []
        self._noted: dict[tuple[int, int], tuple[int, int]] = {}

    def note(self, prompts: Sequence[Prompt], outcome_B: Tensor, threshold: float) -> None:
        outcome_PG = outcome_B.view(len(prompts), self._num_generations)
        tries_P = (~outcome_PG.isnan()).sum(1).tolist()
        right_P = (outcome_PG >= threshold).sum(1).tolist()
        for prompt, tries, right in zip(prompts, tries_P, right_P, strict=True):
            self._noted[prompt.id, prompt.epoch] = (tries, right)

    def update(self) -> None:
        """Update the success rates from the outcomes that all ranks recorded in this step. Collective."""
        seen_D3 = torch.zeros(len(self._drawn), 3, dtype=torch.int64)
        for number, (index, epoch) in enumerate(self._drawn):
            noted = self._noted.get((self._prompts[index].id, epoch))
            if noted is not None:
                seen_D3[number] = torch.tensor((*noted, 1))
        step_N2, seen_D3 = np.zeros_like(self._count_N2), all_reduce(seen_D3.to(self._device)).cpu()
        np.add.at(step_N2, [index for index, _ in self._drawn], seen_D3[:, :2].numpy())
        self._count_N2 += step_N2
        self._recent_N2 = self._recent_N2 * 0.5 ** (1 / HALF_LIFE) + step_N2
        # The groups of other prompts are carried into a later step.
        self._drawn = [drawn for drawn, seen in zip(self._drawn, seen_D3[:, 2].tolist(), strict=True) if not seen]
        self._weight_N, self._noted = None, {}

    def rates(self) -> Floats:
        """Return [N], the current estimate of each prompt's success rate."""
        right_N, wrong_N = self._posterior()
        return right_N / (right_N + wrong_N)

    def weights(self) -> Floats:
        """Return [N], the weight with which each prompt is drawn next, from `FLOOR` to 1."""
        if self._weight_N is None:
            weight_N = np.ones(len(self._prompts))
            if self._config.sampling == "difficulty":
                weight_N = expected_gain(*self._posterior(), self._num_generations)
                weight_N /= weight_N.max()
            self._weight_N = FLOOR + (1 - FLOOR) * np.where(self._skipped(), 0.0, weight_N)
        return self._weight_N

    def numbers(self) -> Numbers:
        """Return `StepLoader`'s metrics, the mean success rate, and the shares of prompts tried and left out now."""
        numbers: Numbers = {
            **super().numbers(),
            "curriculum/success_rate": (float(self.rates().mean()), 1),
            "curriculum/tried_frac": (float((self._count_N2[:, 0] > 0).mean()), 1),
        }
        if self._follows:
            numbers["curriculum/skipped_frac"] = (float(self._skipped().mean()), 1)
        return numbers

    def tried_prompts(self) -> list[dict[str, Any]]:
        """Return the prompts that were tried, hardest first, each with its tries and estimated success rate."""
        rate_N = self.rates()
        rows: list[dict[str, Any]] = []
        for i in np.argsort(rate_N, kind="stable").tolist():
            prompt, (tries, right) = self._prompts[i], self._count_N2[i].tolist()
            if tries:
                numbers = {"tries": tries, "right": right, "success_rate": round(float(rate_N[i]), 4)}
                rows.append({"prompt_id": prompt.id, **numbers, "prompt": prompt.text})
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the prompts drawn so far, and the counts after the last update: `index` lists the
        prompts that were tried, `counts` their completions and right completions, `recent` both discounted by age, and
        `drawn` the prompts, with their epochs, whose outcomes are still to come."""
        index = np.flatnonzero(self._count_N2[:, 0])
        counts = {"index": index, "counts": self._count_N2[index], "recent": self._recent_N2[index]}
        # Plain numbers, since a checkpoint may only contain types of torch and Python.
        lists = {name: values.tolist() for name, values in counts.items()}
        return {**super().state_dict(), **lists, "drawn": list(self._drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `StepLoader`. With another number of prompts, success rates are counted from the start."""
        super().load_state_dict(state)
        self._count_N2[:], self._recent_N2[:] = 0, 0.0
        self._weight_N, self._drawn, self._noted = None, [], {}
        if state["length"] == len(self._prompts) and (index := state["index"]):
            self._count_N2[index], self._recent_N2[index] = state["counts"], state["recent"]
            self._drawn = list(state.get("drawn", ()))

    def _posterior(self) -> tuple[Floats, Floats]:
        """Return the parameters, [N] each, of the beta distribution of each prompt's success rate.

        The prior mean of a prompt is the rate of its class, and the prior mean of a class is the overall rate. Each
        prior counts as much as one group of completions.
        """
        prior, tries_N, right_N = self._num_generations, self._recent_N2[:, 0], self._recent_N2[:, 1]
        overall = (right_N.sum() + 0.5 * prior) / (tries_N.sum() + prior)
        tries_C, right_C = np.bincount(self._class_N, tries_N), np.bincount(self._class_N, right_N)
        rate_N = ((right_C + prior * overall) / (tries_C + prior))[self._class_N]
        return prior * rate_N + right_N, prior * (1 - rate_N) + tries_N - right_N

    def _skipped(self) -> NDArray[np.bool_]:
        """bool [N], True for prompts that skip_above and skip_below leave out."""
        low, high = self._config.skip_below, self._config.skip_above
        tries_N, right_N = self._recent_N2[:, 0], self._recent_N2[:, 1]
        rate_N = right_N / np.maximum(tries_N, 1e-9)
        outside_N = rate_N >= (np.inf if high is None else high)
        outside_N |= rate_N <= (-np.inf if low is None else low)
        return np.asarray(outside_N & (tries_N >= MIN_TRIES))

    def _take(self, count: int) -> list[tuple[int, int]]:
        if not self._follows:
            drawn = super()._take(count)
        elif self._mixture is None:
            drawn = self._weighted(np.arange(len(self._prompts)), count, self._position)
            self._position += count
        else:
            drawn = self._mixture.take(count, self._weighted)
            self._position += count
        self._drawn += drawn
        return drawn

    def _weighted(self, among: Ints, count: int, start: int) -> list[tuple[int, int]]:
        """Draw `count` prompts by weight from the indices `among`, and return the index and epoch of each. Prompts that
        this step has drawn least often come first. `start` is the number of earlier draws from `among`."""
        length, first = len(among), int(among[0])
        often_N = np.bincount([index for index, _ in self._drawn], minlength=len(self._prompts))[among]
        # The first index makes sources of equal length get different random numbers.
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, start, length, *([first] if first else [])]))
        chosen: list[tuple[int, int]] = []
        while len(chosen) < count:
            rounds = int(often_N.min())
            free = np.flatnonzero(often_N == rounds)
            taken = free[draw_weighted(self.weights()[among[free]], count - len(chosen), rng)]
            often_N[taken] += 1
            # Draws of one prompt in a step are at least one round apart, so that their epochs differ.
            chosen += [(int(among[i]), (start + len(chosen) + k) // length + rounds) for k, i in enumerate(taken)]
        return chosen


def expected_gain(right_N: Floats, wrong_N: Floats, num_generations: int) -> Floats:
    """Return [N], the expected product of the probability that a prompt's group teaches something and the failure rate.

    This is E[(1 - p) (1 - p^G - (1 - p)^G)], where the success rate p has a beta distribution with the parameters
    `right_N` and `wrong_N`, both greater than 0. Groups that are all right or all wrong have advantages of 0 (DAPO,
    arXiv:2503.14476, eq. 11). Prompts that are mostly solved have little left to gain.
    """
    total_N = right_N + wrong_N
    gain_N = wrong_N / total_N
    # E[(1 - p) p^k] and E[(1 - p) (1 - p)^k], for k from 0 to G.
    if_right_N, if_wrong_N = gain_N, gain_N
    for k in range(num_generations):
        if_right_N = if_right_N * (right_N + k) / (total_N + 1 + k)
        if_wrong_N = if_wrong_N * (wrong_N + 1 + k) / (total_N + 1 + k)
    return gain_N - if_right_N - if_wrong_N


def draw_weighted(weight_N: Floats, count: int, rng: np.random.Generator) -> Ints:
    """Draw up to `count` different indices, one after another, in proportion to the remaining weights, which must be
    greater than 0. Computed at once, by the largest u^(1/w) with u uniform (Efraimidis and Spirakis 2006)."""
    key_N = np.log1p(-rng.random(len(weight_N))) / weight_N
    count = min(count, len(weight_N))
    top = np.argpartition(-key_N, count - 1)[:count]
    return np.asarray(top[np.argsort(-key_N[top], kind="stable")])


def length_classes(prompts: Sequence[Prompt]) -> Ints:
    """[N], the class of each prompt, from 0, by quantiles of lengths in tokens; equal lengths share a class."""
    length_N = np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.float64)
    edges = np.unique(np.quantile(length_N, np.arange(1, CLASSES) / CLASSES))
    return np.unique(np.searchsorted(edges, length_N, side="right"), return_inverse=True)[1]
