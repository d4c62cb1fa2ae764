"""What one optimizer step takes from a rollout: its rows in micro-batches, with all that the loss needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_grpo.data.batch import MicroBatch, Rollout, TrainBatch
from hybrid_grpo.distributed import all_reduce
from hybrid_grpo.grpo.loss import token_weights


@dataclass(frozen=True)
class Signals:
    """What the loss needs of every row of a rollout; float32 [B, T], on the device of the policy."""

    sampler_logp_BT: Tensor
    old_logp_BT: Tensor | None
    """None where the policy's own, of the same forward, are taken."""
    ref_logp_BT: Tensor | None
    """None without a reference."""
    advantages_BT: Tensor
    counts_B: Tensor
    """bool [B], the completions that take part in the loss."""


def counting_rows(rollout: Rollout, mask_truncated: bool) -> Tensor:
    """bool [B], the completions that take part in the loss: all, or those that ended by themselves."""
    return torch.tensor([not (mask_truncated and c.finish == "length") for c in rollout.completions])


def train_batches(
    micro_batches: Iterable[MicroBatch],
    signals: Signals,
    loss_type: Literal["dapo", "grpo", "dr_grpo"],
    *,
    totals: tuple[int, int],
    max_completion_tokens: int,
) -> Iterator[TrainBatch]:
    """The micro-batches of one optimizer step with their signals, weighted by its counts over all ranks.

    Args:
        totals: tokens and rows that take part, see `totals`.
        max_completion_tokens: see `token_weights`.
    """
    for micro in micro_batches:
        b, tokens = micro.mask_bT.shape
        if not micro.rows:
            nothing = torch.zeros(b, tokens, device=micro.mask_bT.device)
            yield TrainBatch(micro, nothing, None, None, nothing, nothing)
            continue
        weight_bT = token_weights(
            micro.mask_bT & signals.counts_B[micro.rows, None],
            loss_type,
            total_tokens=totals[0],
            total_rows=totals[1],
            max_completion_tokens=max_completion_tokens,
        )
        part = (micro.rows, slice(tokens))
        yield TrainBatch(
            micro,
            signals.sampler_logp_BT[part],
            None if signals.old_logp_BT is None else signals.old_logp_BT[part],
            None if signals.ref_logp_BT is None else signals.ref_logp_BT[part],
            signals.advantages_BT[part],
            weight_bT,
        )


def totals(rollout: Rollout, counts_B: Tensor, rows: range) -> tuple[int, int]:
    """Tokens and rows over all ranks that take part in an optimizer step, of which `rows` are this rank's."""
    lengths = [rollout.lengths[row] for row in rows if counts_B[row]]
    tokens, count = all_reduce(torch.tensor([sum(lengths), len(lengths)], device=counts_B.device)).tolist()
    return tokens, count
