"""Which prompts are drawn: the success rate of every prompt is kept over the run, and the stream may follow it.

The rates are kept in any case. With the default settings of `curriculum` they change nothing, and the stream is that
of `PromptLoader`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_grpo.config import BatchPlan, CurriculumConfig, DataConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.data.batch import Numbers, Prompt
from hybrid_grpo.data.loader import PromptLoader
from hybrid_grpo.data.mixture import Mixture
from hybrid_grpo.model.ranks import all_reduce

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


class Curriculum(PromptLoader[Prompt]):
    """A stream of prompts that keeps their success rates and, if wanted, follows them.

    The stream and the rates are the same on every rank and on any number of ranks. Drawing by weights is seeded by the
    position in the stream, and without replacement within a step as long as there are prompts left.

    Args:
        prompts: prompts to train on.
        plan: the batch equation; a batch is a minibatch, so that its prompts do not depend on the number of ranks.
        rank: number of this rank.
        config: whether and how the stream follows the success rates.
        seed: see `PromptLoader`.
        data: whether the stream is shuffled, and from which sources it is mixed.
        device: where collectives take place.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        plan: BatchPlan,
        rank: int,
        config: CurriculumConfig,
        seed: int,
        data: DataConfig,
        device: torch.device,
    ) -> None:
        batch_size = plan.world_size * plan.prompts_per_rank // plan.num_minibatches
        super().__init__(prompts, batch_size, rank, plan.world_size, seed, data.shuffle)
        self._mixture = Mixture(data.mixture, prompts, seed, data.shuffle) if data.mixture else None
        self._config = config
        self._num_generations = plan.own_generations
        self._device = device
        self._class_N = length_classes(prompts)
        self._count_N2 = np.zeros((len(prompts), 2), dtype=np.int64)
        self._recent_N2 = np.zeros((len(prompts), 2))
        self._weight_N: Floats | None = None
        self._drawn: list[tuple[int, int]] = []
        self._noted: dict[tuple[int, int], tuple[int, int]] = {}

    def next_prompts(self, batches: int) -> list[Prompt]:
        """This rank's prompts of the next global batches, batch after batch, each with the epoch it was drawn in."""
        if self._mixture is not None:  # its quotas are those of a whole step
            share = self._batch_size // self._world_size
            starts = (batch * self._batch_size + self._rank * share for batch in range(batches))
            wanted = [number for start in starts for number in range(start, start + share)]
            return self.more_prompts(batches * self._batch_size, wanted)
        return [replace(prompt, epoch=epoch) for _ in range(batches) for prompt, epoch in self.next_batch()]

    def more_prompts(self, count: int, wanted: list[int]) -> list[Prompt]:
        """Those of the next `count` prompts that are `wanted` here; see `PromptLoader.draw`."""
        return [replace(prompt, epoch=epoch) for prompt, epoch in self.draw(count, wanted)]

    def note(self, prompts: Sequence[Prompt], outcome_B: Tensor, threshold: float) -> None:
        """Take note of the groups of these prompts, [P], which this rank was given since the last update. Outcomes of
        `threshold` or more (`eval.threshold`) are right, and NaN is not counted."""
        outcome_PG = outcome_B.view(len(prompts), self._num_generations)
        tries_P = (~outcome_PG.isnan()).sum(1).tolist()
        right_P = (outcome_PG >= threshold).sum(1).tolist()
        for prompt, tries, right in zip(prompts, tries_P, right_P, strict=True):
            self._noted[prompt.id, prompt.epoch] = (tries, right)

    def update(self) -> None:
        """Bring the success rates up to date after a step, from the notes of all ranks. Collective."""
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
        """How far the run has come, how well the prompts are solved, and how many were tried and are left out now."""
        numbers: Numbers = {
            "data/epoch": (self.position / len(self._prompts), 1),
            "progress/completions": (self.position * self._num_generations, 1),
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
        mixture = {} if self._mixture is None else {"mixture": self._mixture.state_dict()}
        return {**super().state_dict(), **{name: values.tolist() for name, values in counts.items()}, **mixture}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; see `PromptLoader`."""
        super().load_state_dict(state)
        refuse(
            self._mixture is None and "mixture" in state,
            "data.mixture: the checkpoint was made with one, this run has none: resume with the same, or start anew"
            " with another run.name",
        )
        if self._mixture is not None:
            self._mixture.load_state_dict(state.get("mixture"))
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
        if self._mixture is None and not self._config.follows:
            drawn = super()._take(count)
        else:
            every = np.arange(len(self._prompts))
            if self._mixture is None:
                drawn = self._weighted(every, count, self._position)
            else:
                drawn = self._mixture.take(count, self._weighted if self._config.follows else None)
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
