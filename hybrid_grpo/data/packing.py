"""Divides rows into micro-batches within a token budget: packed without padding, or padded with rows of similar length.

Every rank runs the same number of micro-batches, since each is a collective forward under ZeRO-3. A rank that has none
left runs fillers, which are dummy micro-batches of one token and no rows.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

import numpy as np
import torch

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.data.batch import MicroBatch
from hybrid_grpo.distributed.ranks import all_reduce
from hybrid_grpo.model.attention import Segments
from hybrid_grpo.model.reading import TEXT, Reading, joined_positions
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.model.upload import Selection, upload

_WORTH_SHARING = 0.1
"""Minimum fraction of the tokens that sharing prompts must save, since it makes attention gather keys and use masks."""
_ON_GPU, _ON_CPU = 16_384, 4_096
"""Default number of tokens of one forward and backward pass."""
_SCORED = 4
"""Budget factor for forwards without gradients; large, since an offloaded reference streams its weights in each one."""


@dataclass(frozen=True)
class _Group:
    """Rows that belong in the same micro-batch."""

    parts: list[list[TokenRow]]
    """Indexed as [part][row]. The rows of a part have the same prompt and share its forward."""

    @cached_property
    def tokens(self) -> int:
        return sum(len(part[0].prompt) + sum(len(row.completion) - 1 for row in part) for part in self.parts)


def token_budget(policy: PolicyConfig, *, on_gpu: bool, gradients: bool) -> int:
    """Return the token budget of a micro-batch. A forward without gradients keeps no activations, so its budget is
    several times as large. With gradient checkpointing, training keeps almost none either, so both budgets are
    equal."""
    tokens = policy.micro_batch_tokens or (_ON_GPU if on_gpu else _ON_CPU)
    return tokens * (1 if gradients or policy.gradient_checkpointing else _SCORED)


def pack(
    rows: Sequence[TokenRow],
    budget: int,
    device: torch.device,
    *,
    share: Literal["auto", "on", "off"],
    reading: Reading = TEXT,
    together: int = 1,
) -> list[MicroBatch]:
    """Make micro-batches without padding, of about equal numbers of tokens, the same number on every rank. Collective.
    A row longer than the `budget` gets a micro-batch of its own. `share`: whether a prompt that several rows have is
    computed once; auto: if that saves a tenth of the tokens. Rows with the same prompt, and with indices from
    k * together to (k + 1) * together - 1, are not separated."""
    units = _units(rows, together)
    groups = [_Group([[row] for row in unit]) for unit in units]
    if share != "off":
        shared = _groups(rows, budget) if together == 1 else [_Group([unit]) for unit in units]
        every, fewer = (sum(group.tokens for group in way) for way in (groups, shared))
        if share == "on" or every - fewer >= _WORTH_SHARING * every:
            groups = shared
    return _balanced(groups, budget, device, reading)


def _units(rows: Sequence[TokenRow], together: int) -> list[list[TokenRow]]:
    """Return the rows that are not separated; see `pack`."""
    return [list(unit) for _, unit in groupby(rows, lambda row: row.index // together)]


def _balanced(groups: list[_Group], budget: int, device: torch.device, reading: Reading) -> list[MicroBatch]:
    """Make micro-batches without splitting groups; see `pack`. Collective."""
    # A row longer than the budget counts as filling it.
    count = -(-sum(min(group.tokens, budget) for group in groups) // budget)
    # Two groups that each exceed half the budget do not fit into one micro-batch.
    count = max(count, sum(2 * group.tokens > budget for group in groups))
    while any(len(part) > 1 and sum(group.tokens for group in part) > budget for part in _spread(groups, count)):
        count += 1
    most = int(all_reduce(torch.tensor(count, device=device), "max"))
    parts = [part for part in _spread(groups, most) if part]
    return [_packed(part, device, reading) for part in parts] + _fillers(most - len(parts), device)


def _groups(rows: Sequence[TokenRow], budget: int) -> list[_Group]:
    """Return groups of rows with the same prompt, each as large as the budget allows. They need not be consecutive:
    histories of an agent alternate."""
    groups: list[list[TokenRow]] = []
    newest: dict[tuple[int, ...], tuple[list[TokenRow], int]] = {}
    for row in rows:
        prompt, more = tuple(row.prompt), len(row.completion) - 1
        group, tokens = newest.get(prompt, ([], budget + 1))
        if tokens + more > budget:
            groups.append(group := [])
            tokens = len(prompt)
        group.append(row)
        newest[prompt] = group, tokens + more
    return [_Group([group]) for group in groups]


def _spread(groups: list[_Group], count: int) -> list[list[_Group]]:
    """Put each group, longest first, into the shortest of `count` parts (Graham, SIAM J. Appl. Math. 17, 1969)."""
    parts: list[list[_Group]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for group in sorted(groups, key=lambda group: -group.tokens):
        load, lightest = loads[0]
        parts[lightest].append(group)
        heapq.heapreplace(loads, (load + group.tokens, lightest))
    return parts


def _packed(groups: list[_Group], device: torch.device, reading: Reading) -> MicroBatch:
    """Make one sequence: the prompt of each part, followed by the part's completions without their last tokens."""
    tokens: list[int] = []
    positions: list[np.ndarray] = []
    source: list[int] = []
    own: list[tuple[int, int]] = []
    prefix: list[tuple[int, int]] = []
    parts = [part for group in groups for part in group.parts]
    for part in parts:
        prompt, start, shared = part[0].prompt, len(tokens), len(part) > 1
        tokens += prompt
        of_prompt, after = reading.positions(prompt)
        positions.append(of_prompt)
        if shared:
            own.append((start, len(prompt)))
            prefix.append((start, 0))
        for row in part:
            completion, begin = row.completion[:-1], len(tokens)
            tokens += completion
            positions.append(reading.positions(completion)[0] + after)
            before = [start + len(prompt) - 1, *range(begin, len(tokens))]
            source += [before[target] for target in row.targets]
            if not shared:
                own.append((start, len(tokens) - start))
                prefix.append((start, 0))
            elif completion:
                own.append((begin, len(completion)))
                prefix.append((start, len(prompt)))
    segments = Segments(own, prefix, device, reading.blocks(tokens))
    return _micro_batch(parts, [tokens], joined_positions(positions), source, segments, device, reading)


def pad(
    rows: Sequence[TokenRow], budget: int, device: torch.device, *, reading: Reading = TEXT, together: int = 1
) -> list[MicroBatch]:
    """Make micro-batches as `pack` does, but pad rows to the longest, for models that cannot be packed. Collective."""
    units = _units(rows, together)
    parts = plan_rows([max(row.tokens for row in unit) for unit in units], list(map(len, units)), budget)
    batches = [_padded([row for i in part for row in units[i]], device, reading) for part in parts]
    most = int(all_reduce(torch.tensor(len(batches), device=device), "max"))
    return batches + _fillers(most - len(batches), device, packed=False)


def plan_rows(lengths: Sequence[int], sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Partition units of rows so that each part, padded to its longest row, has at most `budget` tokens; a larger unit
    is alone. The longest come first, so that a run that needs too much memory fails at once, and later forwards reuse
    it. `lengths` are those of the longest row of each unit, and `sizes` their numbers of rows."""
    parts: list[list[int]] = []
    longest = rows = 0
    for unit in sorted(range(len(lengths)), key=lambda unit: -lengths[unit]):
        if not parts or (rows + sizes[unit]) * longest > budget:
            parts.append([])
            longest, rows = lengths[unit], 0
        parts[-1].append(unit)
        rows += sizes[unit]
    return parts


def _padded(rows: list[TokenRow], device: torch.device, reading: Reading) -> MicroBatch:
    width = max(row.tokens for row in rows)
    texts = [(row.prompt + row.completion)[:-1] for row in rows]
    source = [i * width + len(row.prompt) - 1 + t for i, row in enumerate(rows) for t in row.targets]
    tokens = [text + [0] * (width - len(text)) for text in texts]
    positions = joined_positions([reading.positions(text)[0] for text in tokens]).reshape(-1, len(rows), width)
    positions = positions if len(positions) > 1 else positions[0]
    return _micro_batch([[row] for row in rows], tokens, positions, source, None, device, reading)


def _micro_batch(
    parts: list[list[TokenRow]],
    tokens: list[list[int]],
    positions: np.ndarray,
    source: list[int],
    segments: Segments | None,
    device: torch.device,
    reading: Reading,
) -> MicroBatch:
    rows = [row for part in parts for row in part]
    first_b1 = np.array([row.first for row in rows])[:, None]
    end_b1 = first_b1 + np.array([len(row.targets) for row in rows])[:, None]
    indices, token_T = [row.index for row in rows], np.arange(end_b1.max())
    mask_bT = (first_b1 <= token_T) & (token_T < end_b1)
    target_N = np.array([row.completion[target] for row in rows for target in row.targets])
    return MicroBatch(
        indices,
        upload(indices, device),
        upload(tokens, device),
        upload(positions, device),
        Selection(np.array(source), device),
        upload(target_N, device),
        upload(mask_bT, device),
        upload(np.flatnonzero(mask_bT), device),
        segments,
        reading.sidecars(parts, [token for text in tokens for token in text], target_N, device),
    )


def _fillers(count: int, device: torch.device, *, packed: bool = True) -> list[MicroBatch]:
    """Return dummy micro-batches of one token and no rows."""
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    segments = Segments([(0, 1)], [(0, 0)], device) if packed else None
    source, [no_token] = Selection(np.array([0]), device), zero
    return [MicroBatch([], no_token[:0], zero, zero, source, no_token, zero > 0, no_token, segments)] * count
