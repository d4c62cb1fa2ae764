"""Divides rows into micro-batches within a token budget: packed without padding, or padded with rows of similar length.

Packed rows form a tree, in which what several begin with is computed once. Every rank runs the same number of
micro-batches, since each is a collective forward under ZeRO-3. A rank that has none left runs fillers, which are dummy
micro-batches of one token and no rows.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby, pairwise
from typing import Any, Literal, Self

import numpy as np
import torch

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.data.batch import MicroBatch
from hybrid_grpo.distributed.ranks import all_gather_objects, all_reduce
from hybrid_grpo.model.attention import Segments
from hybrid_grpo.model.reading import TEXT, Reading, joined_positions
from hybrid_grpo.model.sidecars import Piece, TokenRow
from hybrid_grpo.model.ulysses import SharedTargets, SplitSegments
from hybrid_grpo.model.upload import Selection, upload

_WORTH_SHARING = 0.1
"""Minimum fraction of the tokens that sharing must save, since it makes attention gather keys and use masks."""
_SHORTEST = 8
"""Fewest tokens beyond a prompt that rows share: a piece is one more segment of attention, and one more scan."""
_ON_GPU, _ON_CPU = 16_384, 4_096
"""Default number of tokens of one forward and backward pass."""
_SCORED = 4
"""Budget factor for forwards without gradients; large, since an offloaded reference streams its weights in each one."""


@dataclass(frozen=True)
class _Tree:
    """Rows that belong in the same micro-batch."""

    rows: list[TokenRow]
    pieces: list[Piece]
    paths: list[list[int]]
    """The numbers of each row's pieces, which together are its tokens."""

    @cached_property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    @classmethod
    def apart(cls, rows: list[TokenRow]) -> Self:
        """Return rows that share nothing."""
        return cls(rows, [Piece(row, 0, row.tokens) for row in rows], [[number] for number in range(len(rows))])

    @classmethod
    def of(cls, rows: Sequence[TokenRow], reading: Reading) -> Self:
        """Return rows that share what they begin with, in pieces of at least `_SHORTEST` tokens or a whole prompt."""
        rows = sorted(rows, key=lambda row: row.ids)
        common = _in_common(rows, reading)
        pieces: list[Piece] = []
        paths: list[list[int]] = [[] for _ in rows]
        left = [(0, len(rows), 0, -1)]
        while left:
            at, stop, begin, parent = left.pop()
            while at < stop:
                after = at + 1
                while after < stop and (common[after][0] - begin >= _SHORTEST or common[after][1] > begin):
                    after += 1
                end = min((tokens for tokens, _ in common[at + 1 : after]), default=rows[at].tokens)
                for path in paths[at:after]:
                    path.append(len(pieces))
                longer = next((k for k in range(at, after) if rows[k].tokens > end), after)
                left.append((longer, after, end, len(pieces)))
                row = next((row for row in rows[at:after] if row.sidecars), rows[at])
                pieces.append(Piece(row, begin, end, parent))
                at = after
        return cls(rows, pieces, paths)


def _in_common(rows: Sequence[TokenRow], reading: Reading) -> list[tuple[int, int]]:
    """Return with how many tokens, computed alike, each row and the one before it begin, 0 for the first; and the
    length of their prompt if it is the same, else 0."""
    found = [(0, 0)][: len(rows)]
    for before, row in pairwise(rows):
        common, prompt = reading.alike(before, row, begin_alike(before.ids, row.ids)), len(row.prompt)
        found.append((common, prompt if prompt == len(before.prompt) and prompt <= common else 0))
    return found


def begin_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens with which two texts begin."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def token_budget(policy: PolicyConfig, *, on_gpu: bool, gradients: bool) -> int:
    """Return the token budget of a micro-batch. A forward without gradients keeps no activations, so its budget is
    larger, but not with gradient checkpointing, where training keeps almost none either."""
    tokens = policy.micro_batch_tokens or (_ON_GPU if on_gpu else _ON_CPU)
    return tokens * (1 if gradients or policy.gradient_checkpointing else _SCORED)


def pack(
    rows: Sequence[TokenRow], budget: int, device: torch.device, *, share: Literal["auto", "on", "off"],
    reading: Reading = TEXT, together: int = 1, group: Any = None,
) -> list[MicroBatch]:  # fmt: skip
    """Make micro-batches without padding, of about equal numbers of tokens, the same number on every rank. Collective.
    A row longer than the `budget` gets a micro-batch of its own. `share`: whether what several rows begin with is
    computed once; auto: if that saves a tenth of the tokens. Rows with the same prompt, and with indices from
    k * together to (k + 1) * together - 1, are not separated. The ranks of a `group` compute each micro-batch together,
    of whose tokens every one has its share of the budget."""
    budget *= 1 if group is None else group.size()
    units = _units(rows, together)
    trees = [_Tree.apart(unit) for unit in units]
    if share != "off":
        shared = [_Tree.of(part, reading) for part in (_parts(rows, budget, reading) if together == 1 else units)]
        every, fewer = (sum(tree.tokens for tree in way) for way in (trees, shared))
        if share == "on" or every - fewer >= _WORTH_SHARING * every:
            trees = shared
    return _balanced(trees, budget, device, reading, group)


def _units(rows: Sequence[TokenRow], together: int) -> list[list[TokenRow]]:
    """Return the rows that are not separated; see `pack`."""
    return [list(unit) for _, unit in groupby(rows, lambda row: row.index // together)]


def _balanced(trees: list[_Tree], budget: int, device: torch.device, reading: Reading, group: Any) -> list[MicroBatch]:
    """Make micro-batches without splitting trees; see `pack`. Collective."""
    # A row longer than the budget counts as filling it.
    count = -(-sum(min(tree.tokens, budget) for tree in trees) // budget)
    # Two trees that each exceed half the budget do not fit into one micro-batch.
    count = max(count, sum(2 * tree.tokens > budget for tree in trees))
    while any(len(part) > 1 and sum(tree.tokens for tree in part) > budget for part in _spread(trees, count)):
        count += 1
    if group is not None:
        batches = _shared([part for part in _spread(trees, count) if part], device, reading, group)
        count = len(batches)
    most = int(all_reduce(torch.tensor(count, device=device), "max"))
    if group is None:
        parts = [part for part in _spread(trees, most) if part]
        batches = [_packed(part, _Packed.of(part, reading), device, reading) for part in parts]
    return batches + fillers(most - len(batches), device)


def _shared(parts: list[list[_Tree]], device: torch.device, reading: Reading, group: Any) -> list[MicroBatch]:
    """Make this rank's shares of the micro-batches of all ranks of a group. Collective in it."""
    own, rank, n = [_Packed.of(part, reading) for part in parts], group.rank(), group.size()
    batches = []
    for owner, theirs in enumerate(all_gather_objects(own, group)):
        for number, packed in enumerate(theirs):
            packed = packed.padded(n)
            part = slice(rank * len(packed.tokens) // n, (rank + 1) * len(packed.tokens) // n)
            split = SplitSegments(Segments.of_tree(packed.own, packed.parents, device), group)
            of_source, of_target = np.array(packed.source), np.array(packed.target)
            targets = SharedTargets(of_source, of_target, part, group, device, owns=owner == rank)
            micro = _packed(parts[number], packed, device, reading) if owner == rank else fillers(1, device)[0]
            ids, places = upload([packed.tokens[part]], device), upload(packed.positions[..., part], device)
            batches.append(replace(micro, input_ids_bS=ids, position_ids=places, segments=split, sidecars=(targets,)))
    return batches


def _parts(rows: Sequence[TokenRow], budget: int, reading: Reading) -> list[list[TokenRow]]:
    """Divide rows where they have nothing in common, and where their tree would exceed the budget."""
    rows = sorted(rows, key=lambda row: row.ids)
    parts: list[list[TokenRow]] = []
    tokens = 0
    for row, (common, prompt) in zip(rows, _in_common(rows, reading), strict=True):
        # At least so much is shared, however the pieces are divided.
        shared = max(common - _SHORTEST + 1, prompt)
        if shared <= 0 or tokens + row.tokens - shared > budget:
            parts.append([])
            tokens = shared = 0
        parts[-1].append(row)
        tokens += row.tokens - shared
    return parts


def _spread(trees: list[_Tree], count: int) -> list[list[_Tree]]:
    """Put each tree, longest first, into the shortest of `count` parts (Graham, SIAM J. Appl. Math. 17, 1969)."""
    parts: list[list[_Tree]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for tree in sorted(trees, key=lambda tree: -tree.tokens):
        load, lightest = loads[0]
        parts[lightest].append(tree)
        heapq.heapreplace(loads, (load + tree.tokens, lightest))
    return parts


@dataclass(frozen=True)
class _Packed:
    """One sequence of the pieces of trees: its tokens, and for each piece its place and the piece that it continues."""

    tokens: list[int]
    positions: np.ndarray
    own: list[tuple[int, int]]
    parents: list[int]
    source: list[int]
    target: list[int]

    @classmethod
    def of(cls, trees: list[_Tree], reading: Reading) -> Self:
        found = cls([], np.empty(0), [], [], [], [])
        tokens, own, positions = found.tokens, found.own, list[np.ndarray]()
        for tree in trees:
            first = len(own)
            for row, begin, end, parent in tree.pieces:
                own.append((len(tokens), end - begin))
                found.parents.append(first + parent if parent >= 0 else -1)
                tokens += row.ids[begin:end]
                positions.append(reading.positions(row.ids[:end])[0][:, begin:])
            for row, path in zip(tree.rows, tree.paths, strict=True):
                place = np.concatenate([start + np.arange(length) for start, length in (own[first + n] for n in path)])
                found.source.extend(place[len(row.prompt) - 1 + np.array(row.targets)].tolist())
                found.target.extend(row.completion[target] for target in row.targets)
        return replace(found, positions=joined_positions(positions))

    def padded(self, multiple: int) -> Self:
        """Return the sequence with a piece that nothing attends to, if its length is not a multiple."""
        if not (more := -len(self.tokens) % multiple):
            return self
        own, positions = [*self.own, (len(self.tokens), more)], np.pad(self.positions, ((0, 0), (0, more)))
        return replace(self, tokens=self.tokens + [0] * more, positions=positions, own=own, parents=[*self.parents, -1])


def _packed(trees: list[_Tree], packed: _Packed, device: torch.device, reading: Reading) -> MicroBatch:
    segments = Segments.of_tree(packed.own, packed.parents, device, reading.blocks(packed.tokens))
    rows, pieces = (list(chain(*parts)) for parts in zip(*((tree.rows, tree.pieces) for tree in trees), strict=True))
    return _micro_batch(rows, pieces, [packed.tokens], packed.positions, packed.source, segments, device, reading)


def pad(
    rows: Sequence[TokenRow], budget: int, device: torch.device, *, reading: Reading = TEXT, together: int = 1
) -> list[MicroBatch]:
    """Make micro-batches as `pack` does, but pad rows to the longest, for models that cannot be packed. Collective."""
    units = _units(rows, together)
    parts = plan_rows([max(row.tokens for row in unit) for unit in units], list(map(len, units)), budget)
    batches = [_padded([row for i in part for row in units[i]], device, reading) for part in parts]
    most = int(all_reduce(torch.tensor(len(batches), device=device), "max"))
    return batches + fillers(most - len(batches), device, packed=False)


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
    return _micro_batch(rows, [], tokens, positions, source, None, device, reading)


def _micro_batch(
    rows: list[TokenRow], pieces: list[Piece], tokens: list[list[int]], positions: np.ndarray, source: list[int],
    segments: Segments | None, device: torch.device, reading: Reading,
) -> MicroBatch:  # fmt: skip
    first_b1 = np.array([row.first for row in rows])[:, None]
    end_b1 = first_b1 + np.array([len(row.targets) for row in rows])[:, None]
    indices, token_T = [row.index for row in rows], np.arange(end_b1.max())
    mask_bT = (first_b1 <= token_T) & (token_T < end_b1)
    target_N = np.array([row.completion[target] for row in rows for target in row.targets])
    flat = [token for text in tokens for token in text]
    return MicroBatch(
        indices, upload(indices, device), upload(tokens, device), upload(positions, device),
        Selection(np.array(source), device), upload(target_N, device), upload(mask_bT, device),
        upload(np.flatnonzero(mask_bT), device), segments,
        reading.sidecars(rows, pieces, flat, np.array(source), target_N, device),
    )  # fmt: skip


def fillers(count: int, device: torch.device, *, packed: bool = True) -> list[MicroBatch]:
    """Return dummy micro-batches of one token and no rows."""
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    segments = Segments([(0, 1)], [(0, 0)], device) if packed else None
    source, [no_token] = Selection(np.array([0]), device), zero
    return [MicroBatch([], no_token[:0], zero, zero, source, no_token, zero > 0, no_token, segments)] * count
