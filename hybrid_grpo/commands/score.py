"""`score`: reward functions tried on completions that are there, before a run. No model, no ranks.

A JSON object for every completion, as `generate` names them: `id` is the number of the row, `sample` that of its
completion; what each function said, and of those that failed why. Standard error gets a summary.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.progress import track

from hybrid_grpo.commands.offline import Line, patient, table, tokenizer_for
from hybrid_grpo.config import ScoreConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import leading_argument, parse
from hybrid_grpo.config.reward_checks import check_score
from hybrid_grpo.run.files import json_safe

if TYPE_CHECKING:
    from hybrid_grpo.data.completed import Completed
    from hybrid_grpo.rewards.functions import Failure, Request
    from hybrid_grpo.rewards.scoring import Rewards
    from hybrid_grpo.rewards.workers.pool import Lane, Outcome

COMMAND = "score FILE"
_ROWS = 256
"""Rows that are scored before their rewards are written."""


def run(arguments: list[str]) -> None:
    """Parse, score and sum up; a reader of the output who has had enough ends it quietly."""
    source, options = leading_argument(arguments, f"hybrid-grpo {COMMAND} --rewards '[{{function: ...}}]' [options]")
    config = parse(ScoreConfig, options, COMMAND).config
    check_score(config, source)
    try:
        _score(config, source)
    except BrokenPipeError:
        # What is still buffered would fail once more when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _score(config: ScoreConfig, source: str) -> None:
    # The settings are sound: now the imports that take seconds.
    from hybrid_grpo.data.completed import read_completed
    from hybrid_grpo.rewards.loading import load_rewards
    from hybrid_grpo.rewards.scoring import Rewards

    loaded = load_rewards(config.rewards, config.scoring)
    tokenizer = tokenizer_for(loaded, config.policy.model, "the tokenizer of policy.model")
    rows = read_completed(source, config.data, sys.stdin.buffer, tokenizer)
    summaries = {reward.name: _Summary(reward.lane) for reward in loaded}
    rewards = Rewards([replace(reward, lane=summaries[reward.name]) for reward in loaded], patient(config.scoring))
    rewards.load_models()
    batches = [rows[first : first + _ROWS] for first in range(0, len(rows), _ROWS)]
    bar = Console(stderr=True)
    with _output(config.score.output) as file:
        shown = bar.is_terminal and not file.isatty()
        for batch in track(batches, "rows", console=bar, transient=True, disable=not shown):
            for line in _scored(batch, rewards, summaries):
                print(json.dumps(json_safe(line), ensure_ascii=False), file=file)
            file.flush()
    records = {name: summary.record() for name, summary in summaries.items()}
    bar.print(table(records, _LINES))
    for name, summary in summaries.items():
        if summary.first_failure:
            what = f"{name}: first failure at {summary.first_failure}"
            bar.print(what, markup=False, highlight=False, soft_wrap=True)
    if not any(record["scored"] for record in records.values()):
        raise UserError("rewards: nothing could be scored: no function gave a number for any completion")


class _Summary:
    """What one function says of all rows, and how long it takes: a lane that calls another."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._calls: list[Future[Outcome]] = []
        self._told = 0
        self._values: list[float] = []
        self._none = self._timeouts = self._failed = 0
        self.first_failure = ""

    def start(self, request: Request) -> Future[Outcome]:
        """Call the function."""
        self._calls.append(self._lane.start(request))
        return self._calls[-1]

    def failures(self) -> list[Failure | None]:
        """Of every completion that was scored since this was last asked, in the order in which they were given."""
        new, self._told = self._calls[self._told :], len(self._calls)
        return [failure for call in new for failure in call.result().reply.failures]

    def add(self, value: float, failure: Failure | None, where: str) -> None:
        """Count what it said of one completion; NaN where it said nothing."""
        if failure is not None:
            self._failed += 1
            self._timeouts += failure.kind == "timeout"
            self.first_failure = self.first_failure or f"{where}: {failure.message}"
        elif math.isnan(value):
            self._none += 1
        else:
            self._values.append(value)

    def record(self) -> dict[str, float]:
        """In numbers."""
        from hybrid_grpo.rewards.workers.pool import busy_seconds

        values, rows = self._values, len(self._values) + self._none + self._failed
        mean = sum(values) / len(values) if values else math.nan
        squares = sum((value - mean) ** 2 for value in values)
        outcomes = [call.result() for call in self._calls]
        spans = [end_s - start_s for outcome in outcomes for start_s, end_s in outcome.spans]
        busy_s = busy_seconds(outcomes)
        return {
            "scored": len(values),
            "none": self._none,
            "failed": self._failed,
            "timeouts": self._timeouts,
            "mean": mean,
            "std": math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else math.nan,
            "zeros": sum(value == 0 for value in values) / len(values) if values else math.nan,
            "ones": sum(value == 1 for value in values) / len(values) if values else math.nan,
            "slowest_s": max(spans, default=math.nan),
            "calls": len(spans),
            "calls_per_s": len(spans) / busy_s if busy_s else math.nan,
            "completions_per_s": rows / busy_s if busy_s else math.nan,
        }


def _field(label: str, name: str) -> Line:
    return label, lambda record: record[name]


_LINES = [
    _field("scored", "scored"),
    _field("does not apply", "none"),
    _field("failed", "failed"),
    _field("  out of time", "timeouts"),
    _field("mean", "mean"),
    _field("standard deviation", "std"),
    _field("share of 0", "zeros"),
    _field("share of 1", "ones"),
    _field("calls", "calls"),
    _field("slowest call, s", "slowest_s"),
    _field("calls a second", "calls_per_s"),
    _field("completions a second", "completions_per_s"),
]


def _scored(rows: list[Completed], rewards: Rewards, summaries: dict[str, _Summary]) -> list[dict[str, Any]]:
    """The lines of some rows, in order. Groups, which a call may ask for, are of one size: rows alike go together."""
    lines: list[dict[str, Any]] = []
    for count in sorted({len(row.completions) for row in rows}):
        alike = [row for row in rows if len(row.completions) == count]
        completions = [completion for row in alike for completion in row.completions]
        scores = rewards.score([row.prompt for row in alike for _ in range(count)], completions, count)
        failures = {name: summary.failures() for name, summary in summaries.items()}
        for i in range(len(completions)):
            row, sample = alike[i // count].prompt.id, i % count
            for name, summary in summaries.items():
                summary.add(scores.by_function[name][i].item(), failures[name][i], f"row {row}, sample {sample}")
            line = {
                "id": row,
                "sample": sample,
                "reward": scores.reward_B[i].item(),
                "rewards": {name: value_B[i].item() for name, value_B in scores.by_function.items()},
                "failed": {name: failure.message for name, of in failures.items() if (failure := of[i])},
                "extra": {name: stored[i] for name, stored in scores.extra.items()},
            }
            lines.append(line)
    return sorted(lines, key=lambda line: (line["id"], line["sample"]))


@contextmanager
def _output(name: str) -> Iterator[TextIO]:
    if name == "-":
        yield sys.stdout
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(name).open("w", encoding="utf-8", errors="replace"))
        except OSError as error:
            raise UserError(f"score.output {name} cannot be written: {error.strerror}") from error
        yield file
