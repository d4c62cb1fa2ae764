"""Replays a step of a run: records what the loss computes for every token, and compares completions with saved ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from hybrid_grpo.commands.replays.saved_rollouts import Key, SavedRow, key_of
from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.data.batch import Rollout, TrainBatch
from hybrid_grpo.grpo.balance import Assignment
from hybrid_grpo.grpo.correction import sampler_correction
from hybrid_grpo.grpo.loss import kl_penalty
from hybrid_grpo.grpo.surrogates import surrogate
from hybrid_grpo.records.alarms.alarms import Alarms
from hybrid_grpo.records.step_trace import StepTrace
from hybrid_grpo.records.tokens import TokenText, joined, token_table

_FLOATS = pa.list_(pa.float32())
SEEN = {
    **{"old_logp": _FLOATS, "new_logp": _FLOATS, "ref_logp": _FLOATS, "ratio": _FLOATS, "entropy": _FLOATS},
    **{"kl": _FLOATS, "clipped": pa.list_(pa.int8()), "correction": _FLOATS, "weight": _FLOATS},
}
"""Columns that a replay adds to a rollout's columns, one number per sampled token; see docs/rollouts.md."""
SKIPPED = "policy/skipped_update"
"""Name of the metric that is 1 for a step whose update was skipped because of alarms."""
TOLERANCE = 1e-6
"""The largest difference at which two numbers count as the same; relative for numbers above 1."""


class LoggedSkips(Alarms):
    """Skips the updates that the run's alarms skipped, according to its metrics.jsonl, whose lines are `logged`."""

    def __init__(self, logged: Mapping[int, Mapping[str, Any]]) -> None:
        super().__init__()
        self._skipped = {step for step, line in logged.items() if line.get(SKIPPED)}

    @property
    def may_skip(self) -> bool:
        return bool(self._skipped)

    def skips(self, step: int, values: dict[str, float]) -> bool:
        return step in self._skipped


class LossRecorder(StepTrace):
    """Records, from `begin` on, what the loss sees of every token: the columns `SEEN` in `seen`, by (pass, row of the
    rollout). Without a reference, columns that need one are None. `grpo` are the settings of the loss."""

    def __init__(self, grpo: GrpoConfig) -> None:
        super().__init__()
        self._grpo, self._has_begun = grpo, False
        self.seen: dict[tuple[int, int], dict[str, list[float] | None]] = {}

    def begin(self, step: int) -> None:
        super().begin(step)
        self._has_begun = True

    def learned(self, batch: TrainBatch, logp_bT: Tensor, entropy_bT: Tensor) -> None:
        """Record the tokens of a micro-batch. A pass over the rollout has every row once."""
        if not self._has_begun or not batch.micro.rows:
            return
        found = token_columns(batch, logp_bT.detach(), entropy_bT.detach(), self._grpo)
        columns = {name: None if value_bT is None else value_bT.tolist() for name, value_bT in found.items()}
        lengths = batch.micro.mask_bT.sum(1).tolist()
        for place, (row, length) in enumerate(zip(batch.micro.rows, lengths, strict=True)):
            iteration = next(number for number in count(1) if (number, row) not in self.seen)
            self.seen[iteration, row] = {name: v and v[place][:length] for name, v in columns.items()}

    def gather(self, assignment: Assignment, num_generations: int) -> None:
        """Turn `seen`, by the rows that this rank trained on, into the same by the rows that it sampled. Collective."""
        groups: list[dict[tuple[int, int], Any]] = [{} for _ in assignment.taken]
        for (iteration, row), columns in self.seen.items():
            groups[row // num_generations][iteration, row % num_generations] = columns
        self.seen = {
            (iteration, group * num_generations + sample): columns
            for group, found in enumerate(assignment.gather(groups))
            for (iteration, sample), columns in found.items()
        }

    def table(
        self, rollout: Rollout, first_group: int, advantages_BT: Tensor, num_iterations: int, text: TokenText
    ) -> pa.Table:
        """Return the table of this rank's completions (see `token_table`), with the rows repeated for each pass."""
        completions = token_table(rollout, first_group, advantages_BT, text)
        passes = []
        for iteration in range(1, num_iterations + 1):
            rows = [self.seen.get((iteration, row), {}) for row in range(len(completions))]
            table = completions.append_column("iteration", pa.array([iteration] * len(rows), pa.int32()))
            for name, kind in SEEN.items():
                table = table.append_column(name, pa.array([row.get(name) for row in rows], kind))
            passes.append(table)
        return pa.concat_tables(passes)


def token_columns(batch: TrainBatch, logp_bT: Tensor, entropy_bT: Tensor, grpo: GrpoConfig) -> dict[str, Tensor | None]:
    """Return the columns `SEEN` for the tokens of a micro-batch, each [b, T]."""
    real_bT = batch.micro.mask_bT
    own_logp_bT = logp_bT if batch.old_logp_bT is None else batch.old_logp_bT
    old_logp_bT, own_bT = torch.where(batch.own_bT, own_logp_bT, batch.sampler_logp_bT), batch.own_bT
    correction_bT = torch.ones_like(logp_bT)
    if grpo.sampler_correction != "none":
        correction_bT, _ = sampler_correction(own_logp_bT, batch.sampler_logp_bT, own_bT, grpo)
        correction_bT = torch.where(own_bT, correction_bT / batch.correction_mean, 1.0)

    def of(value_bT: Tensor) -> Tensor:
        return torch.where(real_bT, value_bT, 0.0)

    log_ratio_bT = of(logp_bT) - of(old_logp_bT)
    ratio_bT, (_, low_bT, high_bT) = surrogate(log_ratio_bT, of(logp_bT), of(batch.advantages_bT), real_bT, grpo)
    ref_logp_bT = batch.ref_logp_bT
    return {
        "old_logp": old_logp_bT,
        "new_logp": logp_bT,
        "ref_logp": ref_logp_bT,
        "ratio": ratio_bT,
        "entropy": entropy_bT,
        "kl": None if ref_logp_bT is None else kl_penalty(logp_bT, ref_logp_bT, grpo.kl_estimator),
        "clipped": high_bT.char() - low_bT.char(),
        "correction": correction_bT,
        "weight": batch.weight_bT,
    }


def in_saved_order(tables: Sequence[pa.Table], saved: Mapping[Key, SavedRow]) -> pa.Table:
    """Join the completions of all ranks, pass by pass, numbered and ordered as in the saved file, if there is one."""
    table = joined(tables)
    keys = list(map(key_of, table.select(["prompt_id", "epoch", "sample"]).to_pylist()))
    known = {key: row["row"] for key, row in saved.items()}
    for key in keys:
        known.setdefault(key, len(known))
    rows = pa.array([known[key] for key in keys], pa.int32())
    return table.set_column(0, "row", rows).sort_by([("iteration", "ascending"), ("row", "ascending")])


def compare(table: pa.Table, saved: Mapping[Key, SavedRow]) -> dict[str, Any]:
    """Return how the completions of a replay (see `in_saved_order`) differ from the saved completions. `logp` and
    `advantage` are the largest differences at any token, among completions whose tokens are the same."""
    equal = ["prompt_ids", "token_ids", "finish"]
    names = ["row", "prompt_id", "epoch", "sample", *equal, "pieces", "logp", "advantage"]
    made = table.filter(pa.compute.equal(table["iteration"], 1)).select(names).to_pylist()
    found: dict[str, Any] = {"saved": len(saved), "made": len(made), "same": 0, "logp": 0.0, "advantage": 0.0}
    for row in made:
        before = saved.get(key_of(row))
        if before is None or any(row[name] != before[name] for name in equal):
            found.setdefault("first_to_differ", _difference(row, before))
            continue
        found["same"] += 1
        for name in ("logp", "advantage"):
            pairs = zip(row[name], before[name] or (), strict=False)
            found[name] = max([found[name], *(abs(a - b) for a, b in pairs if not math.isnan(a - b))])
    return found


def _difference(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    name = f"row {row['row']} (prompt {row['prompt_id']}, sample {row['sample']})"
    if before is None:
        return f"{name} was not saved"
    if row["prompt_ids"] != before["prompt_ids"]:
        return f"{name} has another prompt"
    pairs = list(zip(row["token_ids"], before["token_ids"], strict=False))
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))
    one, other = (f"{of['pieces'][place]!r}" if place < len(of["pieces"]) else "the end" for of in (row, before))
    return f"{name} has {one} in place of {other} as token {place}"


def same(made: float | None, logged: float | None) -> bool:
    """Return whether two numbers are equal up to `TOLERANCE`. None stands for NaN, infinity, or a missing number."""
    if made is None or logged is None:
        return logged is None and (made is None or not math.isfinite(made))
    return abs(made - logged) <= TOLERANCE * max(1.0, abs(logged))
