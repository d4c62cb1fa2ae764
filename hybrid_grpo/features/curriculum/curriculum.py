"""Which prompts are drawn: the success rate of every prompt is kept over the run, and the order may follow it.

With the default settings the rates are kept and change nothing: prompts are drawn as `ListLoader` draws them.
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
from hybrid_grpo.data.training_prompts import ListLoader, StepLoader, TrainingPrompts
from hybrid_grpo.features.curriculum.settings import CurriculumConfig
from hybrid_grpo.model.ranks import all_reduce, rank

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CLASSES = 16
"""Classes of prompts by their length; those of one class are expected to be about equally hard."""
MIN_TRIES = 4
"""Completions, discounted by their age, that a success rate must rest on before prompts are left out by it."""
HALF_LIFE = 50
"""Steps after which a completion counts half, since the policy that wrote it has changed."""
FLOOR = 0.05
"""Weight of prompts that teach nothing or are left out, where the best has 1. It keeps them from being forgotten."""


@dataclass(frozen=True)
class RatedPrompts(TrainingPrompts):
    """Prompts to train on that are drawn by a `Curriculum`."""

    def loader(self, config: TrainConfig, plan: BatchPlan, device: torch.device) -> StepLoader:
        """See `TrainingPrompts`."""
        return Curriculum(self.prompts, config, plan, rank(), device)


class Curriculum(ListLoader):
    """Draws prompts, keeps their success rates and, if the settings say so, follows them.

    The order and the rates are the same on every rank and on any number of ranks. Drawing by weights is seeded by the
    position in the order, and without replacement within a step as long as there are prompts left. Collectives take
    place on `device`.
    """

    def __init__(
        self, prompts: Sequence[Prompt], config: TrainConfig, plan: BatchPlan, rank: int, device: torch.device
    ) -> None:
        super().__init__(prompts, config, plan, rank)
        self._config = config.of(CurriculumConfig)
        self._device = device
        self._class_N = length_classes(prompts)
        self._count_N2 = np.zeros((len(prompts), 2), dtype=np.int64)
        self._recent_N2 = np.zeros((len(prompts), 2))
        self._weight_N: Floats | None = None
        self._drawn: list[tuple[int, int]] = []
        self._noted: dict[tuple[int, int], tuple[int, int]] = {}

    def note(self, prompts: Sequence[Prompt], outcome_B: Tensor, threshold: float) -> None:
        """See `StepLoader`."""
        outcome_PG = outcome_B.view(len(prompts), self._num_generations)
        tries_P = (~outcome_PG.isnan()).sum(1).tolist()
        right_P = (outcome_PG >= threshold).sum(1).tolist()
        for prompt, tries, right in zip(prompts, tries_P, right_P, strict=True):
            self._noted[prompt.id, prompt.epoch] = (tries, right)

    def update(self) -> None:
        """Update the success rates from the outcomes that all ranks noted in this step. Collective."""
        seen_D2 = torch.zeros(len(self._drawn), 2, dtype=torch.int64)
        for number, (index, epoch) in enumerate(self._drawn):
            noted = self._noted.get((self._prompts[index].id, epoch))
            if noted is not None:
                seen_D2[number] = torch.tensor(noted)
        step_N2 = np.zeros_like(self._count_N2)
        np.add.at(step_N2, [index for index, _ in self._drawn], all_reduce(seen_D2.to(self._device)).cpu().numpy())
        self._count_N2 += step_N2
        self._recent_N2 = self._recent_N2 * 0.5 ** (1 / HALF_LIFE) + step_N2
        self._weight_N, self._drawn, self._noted = None, [], {}

    def rates(self) -> Floats:
        """[N], the success rate of every prompt as it is estimated now."""
        right_N, wrong_N = self._posterior()
        return right_N / (right_N + wrong_N)

    def weights(self) -> Floats:
        """[N], how likely every prompt is to be drawn next, in proportion to each other, from `FLOOR` to 1."""
        if self._weight_N is None:
            weight_N = np.ones(len(self._prompts))
            if self._config.sampling == "difficulty":
                weight_N = expected_gain(*self._posterior(), self._num_generations)
                weight_N /= weight_N.max()
            self._weight_N = FLOOR + (1 - FLOOR) * np.where(self._skipped(), 0.0, weight_N)
        return self._weight_N

    def numbers(self) -> Numbers:
        """Also how well the prompts are solved, and how many were tried and are left out now."""
        numbers: Numbers = {
            **super().numbers(),
            "curriculum/success_rate": (float(self.rates().mean()), 1),
            "curriculum/tried_frac": (float((self._count_N2[:, 0] > 0).mean()), 1),
        }
        if self._config.follows:
            numbers["curriculum/skipped_frac"] = (float(self._skipped().mean()), 1)
        return numbers

    def tried_prompts(self) -> list[dict[str, Any]]:
        """The prompts that were tried, hardest first, with their tries and estimated success rates."""
        rate_N = self.rates()
        rows: list[dict[str, Any]] = []
        for i in np.argsort(rate_N, kind="stable").tolist():
            prompt, (tries, right) = self._prompts[i], self._count_N2[i].tolist()
            if tries:
                numbers = {"tries": tries, "right": right, "success_rate": round(float(rate_N[i]), 4)}
                rows.append({"prompt_id": prompt.id, **numbers, "prompt": prompt.text})
        return rows

    def state_dict(self) -> dict[str, Any]:
        """The position after the prompts handed out so far, and the rates after the last update: `index` has those
        that were tried, `counts` their completions and how many were right, `recent` the same discounted by age."""
        index = np.flatnonzero(self._count_N2[:, 0])
        counts = {"index": index, "counts": self._count_N2[index], "recent": self._recent_N2[index]}
        # Plain numbers, since a checkpoint holds no types but those of torch and Python.
        return {**super().state_dict(), **{name: values.tolist() for name, values in counts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `StepLoader`."""
        super().load_state_dict(state)
        self._count_N2[:], self._recent_N2[:] = 0, 0.0
        if index := state["index"]:
            self._count_N2[index], self._recent_N2[index] = state["counts"], state["recent"]
        self._weight_N, self._drawn, self._noted = None, [], {}

    def _posterior(self) -> tuple[Floats, Floats]:
        """Parameters [N] of the beta distribution of every prompt's success rate.

        The prior of a prompt is the rate of its class, and that of a class the rate of all; each counts as much as a
        group of completions does.
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
        if not self._config.follows:
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
        """Index and epoch of `count` prompts by weight, those first that this step has drawn least often. They are
        drawn among those of these indices, of which `start` were drawn before."""
        length, first = len(among), int(among[0])
        often_N = np.bincount([index for index, _ in self._drawn], minlength=len(self._prompts))[among]
        # Sources of equal length have different random numbers.
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
    """[N], the probability that a prompt's group teaches something, times what is left to learn of the prompt.

    E[(1 - p) (1 - p^G - (1 - p)^G)], where the success rate p has a beta distribution with the parameters `right_N` and
    `wrong_N`, greater than 0. Groups that are all right or all wrong have advantages of 0 (DAPO, arXiv:2503.14476, eq.
    11); of the others, those that are mostly right have little left to gain.
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
    """Up to `count` different indices, drawn one after the other in proportion to the weights of those left, which are
    greater than 0. In one go: the largest u^(1/w), with u uniform (Efraimidis and Spirakis 2006)."""
    key_N = np.log1p(-rng.random(len(weight_N))) / weight_N
    count = min(count, len(weight_N))
    top = np.argpartition(-key_N, count - 1)[:count]
    return np.asarray(top[np.argsort(-key_N[top], kind="stable")])


def length_classes(prompts: Sequence[Prompt]) -> Ints:
    """[N], the class of every prompt, from 0: by quantiles of their lengths in tokens; equal lengths share a class."""
    length_N = np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.float64)
    edges = np.unique(np.quantile(length_N, np.arange(1, CLASSES) / CLASSES))
    return np.unique(np.searchsorted(edges, length_N, side="right"), return_inverse=True)[1]
