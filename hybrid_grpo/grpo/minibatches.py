"""Divides a rollout into optimizer steps: which rows each step uses, in which micro-batches, and with which weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.data.batch import MicroBatch, Rollout, TrainBatch
from hybrid_grpo.grpo.advantages import Total
from hybrid_grpo.grpo.loss import token_weights
from hybrid_grpo.model.upload import upload


@dataclass(frozen=True)
class Signals:
    """What the loss needs for every row of a rollout; tensors are float32 [B, T], on the device of the policy."""

    sampler_logp_BT: Tensor
    old_logp_BT: Tensor | None
    """None to use the log-probabilities of the training forward itself."""
    ref_logp_BT: Tensor | None
    advantages_BT: Tensor

    @property
    def device(self) -> torch.device:
        return self.advantages_BT.device


def optimizer_steps(
    rollout: Rollout,
    signals: Signals,
    split: Callable[[Sequence[int]], list[MicroBatch]],
    grpo: GrpoConfig,
    max_completion_tokens: int,
    total: Total,
    *,
    starts_on_policy: bool,
) -> Iterator[Iterator[TrainBatch]]:
    """Yield `num_iterations` passes of `num_minibatches` optimizer steps, each as its micro-batches. Collective.

    In all passes, `old_logp` comes from the policy that sampled (DeepSeekMath, arXiv:2402.03300, algorithm 1).
    Completions that are not learned from are left out.

    Args:
        split: splits rows into micro-batches, the same number on every rank; called once for each minibatch.
        max_completion_tokens: see `token_weights`.
        total: sums over ranks; called once.
        starts_on_policy: whether the ratio of the first optimizer step is 1 by construction, so that its own
            log-probabilities serve as `old_logp`.
    """
    rows, device = rollout.completions, signals.device
    counts = [c.learned and not (grpo.mask_truncated and c.finish == "length") for c in rows]
    counts_B = upload(counts, device)
    writers = dict.fromkeys(c.writer for c in rows if c.writer and c.learned)
    writers_B = {name: upload([c.writer == name for c in rows], device) for name in writers}
    share = len(counts) // grpo.num_minibatches
    parts = [range(first, first + share) for first in range(0, len(counts), share)]
    minibatches = [[row for row in part if rows[row].learned] for part in parts]
    # All uploads and collectives come before the first forward: nothing between two micro-batches waits for the GPU.
    micro_batches = [split(rows) for rows in minibatches]
    sums = totals(rollout.lengths, counts, minibatches, total)
    for number in range(grpo.num_iterations * grpo.num_minibatches):
        minibatch = number % grpo.num_minibatches
        given = replace(signals, old_logp_BT=None) if number == 0 and starts_on_policy else signals
        counted = counts_B, sums[minibatch]
        yield train_batches(micro_batches[minibatch], given, *counted, grpo, max_completion_tokens, writers_B)


def train_batches(
    micro_batches: Iterable[MicroBatch],
    signals: Signals,
    counts_B: Tensor,
    totals: tuple[int, int],
    grpo: GrpoConfig,
    max_completion_tokens: int,
    writers_B: Mapping[str, Tensor],
) -> Iterator[TrainBatch]:
    """Yield the micro-batches of one optimizer step with their signals, weighted by the step's counts over all ranks.

    Args:
        counts_B: bool [B], True for completions in the loss: all that are learned from, or only those not truncated.
        totals: the tokens and rows of this step on all ranks.
        writers_B: bool [B] by name of each writer, other than the policy, that is learned from: True for its
            completions.
    """
    for micro in micro_batches:
        weight_bT = token_weights(
            micro.mask_bT & micro.of_rows(counts_B[:, None]),
            grpo.loss_type,
            total_tokens=totals[0],
            total_rows=totals[1],
            max_completion_tokens=max_completion_tokens,
        )
        yield TrainBatch(
            micro,
            micro.of_rows(signals.sampler_logp_BT),
            None if signals.old_logp_BT is None else micro.of_rows(signals.old_logp_BT),
            None if signals.ref_logp_BT is None else micro.of_rows(signals.ref_logp_BT),
            micro.of_rows(signals.advantages_BT),
            weight_bT,
            {name: micro.of_rows(rows_B[:, None]) for name, rows_B in writers_B.items()},
        )


def totals(
    lengths: Sequence[int], counts: Sequence[bool], minibatches: Sequence[Sequence[int]], total: Total
) -> list[tuple[int, int]]:
    """Return, for each minibatch, the numbers of tokens and of rows on all ranks that take part in its optimizer step.

    `lengths` are the token counts of this rank's completions, and `counts` says whether each takes part. `minibatches`
    lists the rows of this rank in each minibatch, and `total` sums over ranks.
    """
    taken = [[lengths[row] for row in rows if counts[row]] for rows in minibatches]
    sums = total(torch.tensor([(sum(part), len(part)) for part in taken]))
    return [(tokens, rows) for tokens, rows in sums.tolist()]
