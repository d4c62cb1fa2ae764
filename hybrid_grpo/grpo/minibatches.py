"""Divides a rollout into optimizer steps: which rows each step uses, in which micro-batches, and with which weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.data.batch import MicroBatch, Rollout, TrainBatch
from hybrid_grpo.grpo.baselines import Total
from hybrid_grpo.grpo.correction import sampler_correction
from hybrid_grpo.grpo.loss import token_weights
from hybrid_grpo.model.upload import upload

_TRAINING = 3
"""Cost of a forward and a backward pass, in forward passes."""
_SKIP_THRESHOLD = 0.95
"""Highest cost, as a share of the cost of a step that trains on all rows, at which rows leave the backward pass."""


@dataclass(frozen=True)
class Signals:
    """What the loss needs for every row of a rollout, on the policy's device; float32 [B, T] unless noted."""

    sampler_logp_BT: Tensor
    old_logp_BT: Tensor | None
    """None to use the log-probabilities of the training forward itself."""
    ref_logp_BT: Tensor | None
    advantages_BT: Tensor
    is_old_BT: Tensor | None = None
    """bool, see `Rollout.is_old_BT`."""
    drifts_BT: Tensor | None = None
    """bool, see `TrainBatch`."""

    @property
    def device(self) -> torch.device:
        return self.advantages_BT.device


def in_loss(rollout: Rollout, grpo: GrpoConfig) -> list[bool]:
    """Return for each row, [B], whether its tokens are in the loss."""
    return [c.learned and not (grpo.mask_truncated and c.finish == "length") for c in rollout.completions]


def optimizer_steps(
    rollout: Rollout, signals: Signals, split: Callable[..., list[MicroBatch]], grpo: GrpoConfig,
    max_completion_tokens: int, sum_over_ranks: Total, max_over_ranks: Total | None = None, *, starts_on_policy: bool,
) -> Iterator[Iterator[TrainBatch]]:  # fmt: skip
    """Yield `num_iterations` passes of `num_minibatches` optimizer steps, each as its micro-batches. Collective.

    In all passes, `old_logp` comes from the policy that sampled (DeepSeekMath, arXiv:2402.03300, algorithm 1).
    Completions that are not learned from are left out.

    Args:
        split: splits rows into micro-batches, the same number on every rank, for forwards with or without `gradients`.
        max_completion_tokens: see `token_weights`.
        sum_over_ranks: called once.
        max_over_ranks: takes maxima over ranks; called once. With it, rows of advantage 0 may leave the backward pass
            (see `backward_parts`); None if they have a gradient all the same.
        starts_on_policy: whether the ratio of the first optimizer step is 1 by construction, so that its own
            log-probabilities serve as `old_logp`.
    """
    rows, device = rollout.completions, signals.device
    counts = in_loss(rollout, grpo)
    counts_B, lengths_B = upload(counts, device), upload(rollout.lengths, device)
    writers = dict.fromkeys(c.writer for c in rows if c.writer and c.learned)
    writers_B = {name: upload([c.writer == name for c in rows], device) for name in writers}
    group_of = [row // rollout.num_generations for row in range(len(rows))]
    group_B = upload(group_of, device) if grpo.whole_groups else None
    minibatches = [[row for row in part if rows[row].learned] for part in minibatch_rows(rollout, grpo.num_minibatches)]
    # All uploads and collectives come before the first forward: nothing between two micro-batches waits for the GPU.
    by_gradient: list[dict[bool, list[int]]] = [{True: rows} for rows in minibatches]
    if max_over_ranks is not None:
        moves_B = (signals.advantages_BT != 0).logical_and(upload(rollout.mask_BT, device)).any(1) & counts_B
        by_gradient = backward_parts(rollout.lengths, moves_B.tolist(), minibatches, max_over_ranks)
    micro_batches = [
        [(micro, gradients) for gradients, rows in part.items() for micro in split(rows, gradients=gradients)]
        for part in by_gradient
    ]
    sums = totals(rollout.lengths, counts, minibatches, sum_over_ranks)
    means = [1.0] * len(minibatches)
    if grpo.sampler_normalize:
        own_B = counts_B & upload([not c.writer for c in rows], device)
        own_BT = own_B[:, None] & upload(rollout.mask_BT, device)
        means = correction_means(signals, own_BT, minibatches, grpo, sum_over_ranks)
    for number in range(grpo.num_iterations * grpo.num_minibatches):
        minibatch = number % grpo.num_minibatches
        known = replace(signals, old_logp_BT=None) if number == 0 and starts_on_policy else signals
        part, counted, mean = micro_batches[minibatch], sums[minibatch], means[minibatch]
        yield train_batches(
            part, known, counts_B, counted, mean, grpo, max_completion_tokens, writers_B, lengths_B, group_B
        )


def minibatch_rows(rollout: Rollout, count: int) -> list[range]:
    """Return the rows of each of `count` minibatches."""
    groups, size = rollout.minibatch_groups or [len(rollout.prompts) // count] * count, rollout.num_generations
    return [range((end - own) * size, end * size) for own, end in zip(groups, accumulate(groups), strict=True)]


def backward_parts(
    lengths: Sequence[int], moves: Sequence[bool], minibatches: Sequence[list[int]], max_over_ranks: Total
) -> list[dict[bool, list[int]]]:
    """Return the rows of each minibatch by whether they take part in the backward pass.

    Rows that do not move the policy get only a forward, for their metrics, if that saves time although it needs more
    forwards. Ranks wait for each other in every micro-batch, so the ranks with most tokens decide.

    Args:
        lengths, moves: for each completion, its tokens, and whether its loss may have a gradient other than 0.
        minibatches, max_over_ranks: see `totals` and `optimizer_steps`.
    """
    parts, costs = [], []
    for rows in minibatches:
        # At least one row goes backward, since an optimizer step changes weights even where all gradients are 0.
        kept = {row for row in rows if moves[row]} or set(sorted(rows, key=lengths.__getitem__)[:1])
        parts.append({of: [row for row in rows if (row in kept) == of] for of in (False, True)})
        costs.append([sum(lengths[row] for row in some) for some in (*parts[-1].values(), rows)])
    most = max_over_ranks(torch.tensor(costs)).tolist()
    return [
        part if forwards + _TRAINING * trained < _SKIP_THRESHOLD * _TRAINING * whole else {True: rows}
        for rows, part, (forwards, trained, whole) in zip(minibatches, parts, most, strict=True)
    ]


def train_batches(
    micro_batches: Iterable[tuple[MicroBatch, bool]], signals: Signals, counts_B: Tensor, totals: tuple[int, int],
    correction_mean: float, grpo: GrpoConfig, max_completion_tokens: int, writers_B: Mapping[str, Tensor],
    lengths_B: Tensor, group_B: Tensor | None = None,
) -> Iterator[TrainBatch]:  # fmt: skip
    """Yield the micro-batches of one optimizer step with their signals, weighted by the step's counts over all ranks.

    Args:
        micro_batches: each with whether its loss has a gradient.
        counts_B: bool [B], True for completions in the loss: all that are learned from, or only those not truncated.
        totals: the tokens and rows of this step on all ranks.
        correction_mean: see `TrainBatch`.
        writers_B: bool [B] by name of each writer, other than the policy, that is learned from: True for its
            completions.
        lengths_B: int64 [B], the number of tokens of each completion.
        group_B: int64 [B], the group of each row, for losses that compare completions.
    """
    for micro, has_gradient in micro_batches:
        weight_bT = token_weights(
            micro.mask_bT & micro.of_rows(counts_B[:, None]), grpo.loss_type, total_tokens=totals[0],
            total_rows=totals[1], max_completion_tokens=max_completion_tokens,
            length_b1=micro.of_rows(lengths_B[:, None]),
        )  # fmt: skip
        yield TrainBatch(
            micro, micro.of_rows(signals.sampler_logp_BT),
            None if signals.old_logp_BT is None else micro.of_rows(signals.old_logp_BT),
            None if signals.ref_logp_BT is None else micro.of_rows(signals.ref_logp_BT),
            micro.of_rows(signals.advantages_BT), weight_bT,
            {name: micro.of_rows(rows_B[:, None]) for name, rows_B in writers_B.items()},
            None if signals.is_old_BT is None else micro.of_rows(signals.is_old_BT), has_gradient,
            None if signals.drifts_BT is None else micro.of_rows(signals.drifts_BT), correction_mean,
            None if group_B is None else micro.of_rows(group_B[:, None])[:, 0],
        )  # fmt: skip


def correction_means(
    signals: Signals, own_BT: Tensor, minibatches: Sequence[Sequence[int]], grpo: GrpoConfig, sum_over_ranks: Total
) -> list[float]:
    """Return, for each minibatch, the mean factor of the sampler's correction over its tokens on all ranks, by which
    self-normalized importance sampling divides. `own_BT`: the policy's tokens that are counted."""
    old_logp_BT, sampler_logp_BT = signals.old_logp_BT, signals.sampler_logp_BT
    assert old_logp_BT is not None, "self-normalized weights need a forward before the first optimizer step"
    if signals.is_old_BT is not None:
        old_logp_BT = torch.where(signals.is_old_BT, sampler_logp_BT, old_logp_BT)
    factor_BT, _ = sampler_correction(old_logp_BT, sampler_logp_BT, own_BT, grpo)
    sums = [(factor_BT[list(rows)].sum().item(), own_BT[list(rows)].sum().item()) for rows in minibatches]
    summed = sum_over_ranks(torch.tensor(sums).double()).tolist()
    return [factor / tokens if factor else 1.0 for factor, tokens in summed]


def totals(
    lengths: Sequence[int], counts: Sequence[bool], minibatches: Sequence[Sequence[int]], sum_over_ranks: Total
) -> list[tuple[int, int]]:
    """Return, for each minibatch, the numbers of tokens and of rows on all ranks that take part in its optimizer step.

    `lengths` are the token counts of this rank's completions, and `counts` says whether each takes part. `minibatches`
    lists the rows of this rank in each minibatch.
    """
    taken = [[lengths[row] for row in rows if counts[row]] for rows in minibatches]
    sums = sum_over_ranks(torch.tensor([(sum(part), len(part)) for part in taken]))
    return [(tokens, rows) for tokens, rows in sums.tolist()]
