"""From rows to micro-batches: sequences of like length together, within a token budget.

Every rank gets the same number of micro-batches, since each is a collective forward under ZeRO-3; a rank with
nothing left runs a filler of one token that no result is taken from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybrid_grpo.data.batch import MicroBatch
from hybrid_grpo.distributed import all_reduce


def plan_rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Partition rows so that every part, padded to its longest, has at most `budget` tokens.

    A row longer than the budget is a part of its own. Longest first, so that an out-of-memory shows at once.
    """
    parts: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not parts or (len(parts[-1]) + 1) * longest > budget:
            parts.append([])
            longest = lengths[row]
        parts[-1].append(row)
    return parts


def pack(
    prompt_ids: Sequence[list[int]],
    completion_ids: Sequence[list[int]],
    *,
    budget: int,
    device: torch.device,
    rows: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """Micro-batches over the given rows (all, when not given); the same number on every rank.

    Args:
        prompt_ids, completion_ids: tokens of every row; neither is empty.
        budget: padded tokens of one micro-batch.
        device: where the tensors go.
        rows: indices to take.

    Returns:
        Micro-batches whose `rows` are indices into `prompt_ids`; fillers have none.
    """
    rows = range(len(prompt_ids)) if rows is None else rows
    lengths = [len(prompt_ids[row]) + len(completion_ids[row]) for row in rows]
    batches = [
        _micro_batch([rows[i] for i in part], prompt_ids, completion_ids, device) for part in plan_rows(lengths, budget)
    ]
    most = int(all_reduce(torch.tensor(len(batches), device=device), "max"))
    return batches + [_filler(device) for _ in range(most - len(batches))]


def _micro_batch(
    rows: list[int],
    prompt_ids: Sequence[list[int]],
    completion_ids: Sequence[list[int]],
    device: torch.device,
) -> MicroBatch:
    width = max(len(prompt_ids[row]) + len(completion_ids[row]) for row in rows)
    tokens = max(len(completion_ids[row]) for row in rows)
    input_ids_bS = torch.zeros(len(rows), width, dtype=torch.int64)
    target_mask_bS = torch.zeros(len(rows), width, dtype=torch.bool)
    mask_bT = torch.zeros(len(rows), tokens, dtype=torch.bool)
    for i, row in enumerate(rows):
        prompt, completion = prompt_ids[row], completion_ids[row]
        end = len(prompt) + len(completion)
        input_ids_bS[i, :end] = torch.tensor(prompt + completion)
        target_mask_bS[i, len(prompt) : end] = True
        mask_bT[i, : len(completion)] = True
    return MicroBatch(rows, input_ids_bS.to(device), target_mask_bS.to(device), mask_bT.to(device))


def _filler(device: torch.device) -> MicroBatch:
    return MicroBatch(
        rows=[],
        input_ids_bS=torch.zeros(1, 2, dtype=torch.int64, device=device),
        target_mask_bS=torch.tensor([[False, True]], device=device),
        mask_bT=torch.tensor([[True]], device=device),
    )
