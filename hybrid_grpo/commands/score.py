"""`score`: tries reward functions on existing completions. It loads no policy and needs no launcher.

The completions come from a file, or from the saved rollouts of a run. For each one a JSON line is written: the reward
from every function, the reason for each failure and, for a run, its original rewards. Standard error gets a summary.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from hybrid_grpo.commands.arguments import is_run as folder_is_run
from hybrid_grpo.commands.configs import ScoreConfig
from hybrid_grpo.config.checks import check_output, check_rewards
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.parsing import leading_argument, parse
from hybrid_grpo.config.sources import check_source
from hybrid_grpo.records.console import make_console, make_table
from hybrid_grpo.records.files import json_lines, rollout_files

if TYPE_CHECKING:
    from hybrid_grpo.data.batch import Rollout, Scores
    from hybrid_grpo.distributed.workers.calls import Call, Reply
    from hybrid_grpo.distributed.workers.pool import Caller
    from hybrid_grpo.rewards.loader import Reward

COMMAND = "score FILE_OR_RUN"
_ROWS = 256
"""Rows of a file that are scored before their rewards are written."""
_LINES_ON_TERMINAL = 20
"""Lines that a terminal shows before the summary; files and pipes get all."""
_FOREVER_S = 1e9
"""Replaces scoring.max_wait_s, since no model waits for the rewards; a call keeps its own time limit."""
Line = dict[str, Any]
Parts = tuple[int, "Iterator[tuple[int, list[Rollout], list[Line]]]"]
"""The completions to score: the number of parts, then for each part its step, its groups and, if it comes from a run,
the rewards that the run's own functions gave each completion."""


def run(arguments: list[str]) -> None:
    """Parse the arguments and score the completions."""
    source, options = leading_argument(arguments, f"{COMMAND} [--rewards '[{{function: ...}}]'] [options]")
    folder = Path(source)
    is_run = folder_is_run(source) or (bool(source) and (folder / "rollouts").is_dir())
    defaults = ["--config", f"{folder}/config.yaml"] if is_run else []
    if is_run and (folder / "model").is_dir():
        defaults += ["--policy.model", f"{folder}/model"]
    config = parse(ScoreConfig, [*defaults, *options], COMMAND).config
    _check(config, source, is_run=is_run)
    _score(config, source, is_run=is_run)


def _check(config: ScoreConfig, source: str, *, is_run: bool) -> None:
    """Refuse scoring that would fail. `source` is a file of completions or, if `is_run`, the folder of a run."""
    check_rewards(config.rewards)
    score = config.score
    refuse(
        score.steps is not None and not re.fullmatch(r"\d+|\d+-\d*|-\d+", score.steps),
        f"score.steps {score.steps!r} is not a range of steps: give one as in 100-200, 100-, -200 or 100",
    )
    check_output("score.output", score.output, "the completions that are scored", source)
    output = Path(score.output)
    refuse(
        is_run and output.exists() and Path(source).resolve() in output.resolve().parents,
        f"score.output {output} would replace a file of the run: give another",
    )
    if not is_run:
        refuse(score.steps is not None, f"score.steps {score.steps}: {source} is not the folder of a run: remove it")
        if source != "-":
            check_source("SOURCE", source)


def _score(config: ScoreConfig, source: str, *, is_run: bool) -> None:
    from hybrid_grpo.data.batch import Rollout, Scores
    from hybrid_grpo.rewards.loader import load_rewards
    from hybrid_grpo.rewards.scorer import Rewards, Timeline

    loaded = load_rewards(config.rewards, config.scoring)
    tokenizer = _tokenizer(loaded, config.policy.model)
    count, parts = _saved_steps(config, source, tokenizer) if is_run else _rows(config, source, tokenizer)
    calls: dict[str, list[Future[Reply]]] = {reward.name: [] for reward in loaded}
    loaded = [replace(reward, caller=partial(_recorded, reward.caller, calls[reward.name])) for reward in loaded]
    scoring = replace(config.scoring, max_wait_s=_FOREVER_S)
    # A run is as long as it has saved rollouts, and that is one epoch; a file is one step.
    steps = max(rollout_files(Path(source) / "rollouts"), default=1)
    rewards = Rewards(loaded, scoring, tokenizer, timeline=Timeline(steps, steps))
    rewards.load_models()
    everything: list[Scores] = []
    before: list[Line] = []
    first_failures: dict[str, str] = {}
    console = make_console(stderr=True, highlight=False)
    on_terminal = config.score.output == "-" and sys.stdout.isatty()
    shown, written = console.is_terminal and not on_terminal, 0
    with json_lines(config.score.output, "score.output") as write:
        bar = track(parts, "completions", count, console=console, transient=True, disable=not shown)
        for step, groups, saved in bar:
            lines: list[Line] = []
            # Groups that are scored together have the same size.
            for size in sorted({group.num_generations for group in groups}):
                rollout = reduce(Rollout.joined, (group for group in groups if group.num_generations == size))
                scores = rewards.score(rollout.row_prompts, rollout.completions, size, max(step - 1, 0))
                # Only what the summary needs: what functions store may be long.
                everything.append(Scores(scores.reward_B, scores.by_function, scores.status))
                lines += _lines(rollout, scores)
            if saved:
                lines = [{"step": step, **line, "before": was} for line, was in zip(lines, saved, strict=True)]
            for line in sorted(lines, key=lambda line: (line["id"], line["sample"])):
                written += 1
                if not on_terminal or written <= _LINES_ON_TERMINAL:
                    write(line)
                for name, why in line["failed"].items():
                    where = f"row {line['id']}, sample {line['sample']}"
                    first_failures.setdefault(name, f"step {step}, {where}: {why}" if saved else f"{where}: {why}")
            before += saved
    if on_terminal and written > _LINES_ON_TERMINAL:
        console.print(f"{written - _LINES_ON_TERMINAL} more lines are not shown: set score.output, or use a pipe")
    rewards.unread.report()
    notes = [f"{name}: first failure at {where}" for name, where in first_failures.items()]
    _print_summary(console, reduce(Scores.joined, everything), calls, before, config.eval.threshold, notes)


def _print_summary(
    console: Console, scores: Scores, calls: dict[str, list[Future[Reply]]], before: list[Line], threshold: float,
    notes: list[str],
) -> None:  # fmt: skip
    """Print what each function gave, beside its rewards `before`. Raises UserError if nothing was scored."""
    table = {name: _summary(scores, name, own) for name, own in calls.items()}
    if before:
        for name, value_B in (*scores.by_function.items(), ("weighted sum", scores.reward_B)):
            # A function that the run does not have is compared with the run's weighted sum.
            were = [saved["rewards"].get(name, saved["reward"]) for saved in before]
            table.setdefault(name, {}).update(_compared(were, value_B.tolist(), threshold))
    console.print(_table(table))
    absent = dict.fromkeys(name for saved in before for name in saved["rewards"] if name not in scores.by_function)
    if absent:
        notes = [f"the run's weighted sum also has {', '.join(absent)}, which this command did not call", *notes]
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)
    is_nothing = all(value_B.isnan().all() for value_B in scores.by_function.values())
    refuse(is_nothing, "rewards: nothing could be scored: no function gave a number for any completion")


def _rows(config: ScoreConfig, source: str, tokenizer: Any) -> Parts:
    """Return the completions of a file in parts, all with step 0."""
    from hybrid_grpo.data.completions import read_completions

    groups = read_completions(source, config.data, sys.stdin.buffer, tokenizer)
    starts = range(0, len(groups), _ROWS)
    return len(starts), ((0, groups[start : start + _ROWS], []) for start in starts)


def _saved_steps(config: ScoreConfig, source: str, tokenizer: Any) -> Parts:
    """Return the saved rollouts of a run for the steps that `score.steps` requests, one part per step."""
    from hybrid_grpo.data.completions import read_step

    files, steps = rollout_files(Path(source) / "rollouts"), config.score.steps
    refuse(not files, f"{source} has no rollouts: they are written by a training run with log.rollouts_every above 0")
    first, dash, last = (steps or "-").partition("-")
    low, high = int(first or 0), int(last or max(files)) if dash else int(first)
    chosen = {step: path for step, path in files.items() if low <= step <= high}
    refuse(not chosen, f"score.steps {steps} has no rollouts: the run has those of steps {min(files)} to {max(files)}")

    def read() -> Iterator[tuple[int, list[Rollout], list[Line]]]:
        for step, path in chosen.items():
            rollout, rows = read_step(path, tokenizer)
            yield step, [rollout], [{"reward": row["reward"], "rewards": row["rewards"]} for row in rows]

    return len(chosen), read()


def _recorded(caller: Caller, calls: list[Future[Reply]], call: Call) -> Future[Reply]:
    """Pass on a call, and keep its future reply in `calls`, to report later how long the calls took."""
    calls.append(caller(call))
    return calls[-1]


def _lines(rollout: Rollout, scores: Scores) -> list[Line]:
    """Return [B]: for each completion, the line that is written about it."""
    return [
        {
            "id": prompt.id,
            "sample": row % rollout.num_generations,
            "reward": scores.reward_B[row].item(),
            "rewards": {name: value_B[row].item() for name, value_B in scores.by_function.items()},
            "failed": {name: why[row] for name, why in scores.failures.items() if why[row] is not None},
            "extra": {name: stored[row] for name, stored in scores.extra.items()},
        }
        for row, prompt in enumerate(rollout.row_prompts)
    ]


def _summary(scores: Scores, name: str, calls: Sequence[Future[Reply]]) -> dict[str, float]:
    """Return statistics of one function's rewards and speed over all completions, by the label that is shown."""
    from hybrid_grpo.data.batch import RewardStatus
    from hybrid_grpo.distributed.workers.calls import busy_seconds

    status_B, value_B = scores.status[name], scores.by_function[name]
    value_N = value_B[~value_B.isnan()]
    replies = [call.result() for call in calls]
    spans = [end_s - start_s for reply in replies for start_s, end_s in reply.spans]
    busy_s = busy_seconds(replies) or math.nan
    return {
        "scored": len(value_N), "does not apply": int((status_B == RewardStatus.NOT_APPLICABLE).sum()),
        "failed": int((status_B >= RewardStatus.FAILED).sum()),
        "  out of time": int((status_B == RewardStatus.TIMED_OUT).sum()), "mean": value_N.mean().item(),
        "standard deviation": value_N.std().item() if len(value_N) > 1 else math.nan,
        "share of 0": (value_N == 0).double().mean().item(), "share of 1": (value_N == 1).double().mean().item(),
        "calls": len(spans), "slowest call, s": max(spans, default=math.nan), "calls a second": len(spans) / busy_s,
        "completions a second": len(value_B) / busy_s,
    }  # fmt: skip


def _compared(before: list[float | None], now: list[float], threshold: float) -> dict[str, float]:
    """Compare the old and new rewards of completions that have both; `threshold` or more counts as right."""
    import torch

    pairs = [(b, n) for b, n in zip(before, now, strict=True) if b is not None and not math.isnan(n)]
    before_N, now_N = torch.tensor(pairs, dtype=torch.float64).view(-1, 2).unbind(1)
    was_N, is_N = before_N >= threshold, now_N >= threshold
    return {
        "compared": len(pairs), "mean before": before_N.mean().item(), "mean now": now_N.mean().item(),
        "correlation": torch.corrcoef(torch.stack([before_N, now_N]))[0, 1].item() if len(pairs) > 1 else math.nan,
        "right before only": int((was_N & ~is_N).sum()), "right now only": int((is_N & ~was_N).sum()),
        "share that agrees": (was_N == is_N).double().mean().item(),
    }  # fmt: skip


def _table(columns: dict[str, dict[str, Any]]) -> Table:
    """Return a table with one column for every record and one row for every key that occurs in a record."""
    table = make_table("", columns)
    for key in dict.fromkeys(key for column in columns.values() for key in column):
        table.add_row(key, *(_shown(column.get(key)) for column in columns.values()))
    return table


def _shown(value: Any) -> str:
    """A value as the table shows it; undefined numbers, such as a correlation with a constant, are left blank."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.3f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _tokenizer(rewards: Sequence[Reward], model: str) -> Any:
    """Return the model's tokenizer if the model is a folder or a function requests `completion_ids`; else None.

    Raises:
        UserError: a function requests `completion_ids`, and there is no tokenizer.
    """
    named = [(reward.name, (*reward.interface.required, *(reward.interface.accepted or ()))) for reward in rewards]
    needing = ", ".join(name for name, parameters in named if "completion_ids" in parameters)
    why = f"rewards: {needing} looks at completion_ids, which are made from the texts by the tokenizer of the model"
    refuse(bool(needing) and not model, f"{why}: set policy.model")
    if not needing and not Path(model or "-").is_dir():
        return None

    from hybrid_grpo.model.loading import load_tokenizer

    try:
        return load_tokenizer(model)
    except UserError as error:
        if needing:
            raise UserError(f"{why}: {error}") from error
        return None
