"""`score`: try reward functions on completions that exist already. It loads no policy and needs no launcher.

A file of completions gives a JSON line for each completion: what every function said, and why those failed that did.
Standard error gets a summary. The folder of a run gives a comparison of the new rewards with the run's own, written
into RUN_FOLDER/score; nothing else in the folder changes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from hybrid_grpo.config import ScoreConfig, TrainConfig, reward_name
from hybrid_grpo.config.checks import check_score
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.parsing import leading_argument, parse
from hybrid_grpo.run.files import json_lines, json_safe, reader_may_leave, replace_text

if TYPE_CHECKING:
    from hybrid_grpo.data.batch import Rollout, Scores
    from hybrid_grpo.rewards.functions import Reply, RewardCall
    from hybrid_grpo.rewards.loading import Reward
    from hybrid_grpo.rewards.workers.pool import Caller

COMMAND = "score FILE_OR_RUN"
_ROWS = 256
"""Rows of a file that are scored before their rewards are written."""
_SHOWN = 3
"""Disagreements that are printed."""
_TEXT_SHOWN = 300
"""Characters of a prompt or completion that are printed, from its end."""
_FOREVER_S = 1e9
"""Replaces scoring.max_wait_s, since no model waits for the rewards; a call keeps its own time limit."""


def run(arguments: list[str]) -> None:
    """Parse and score; ends quietly when the reader of the output has closed it."""
    source, options = leading_argument(arguments, f"hybrid-grpo {COMMAND} [--rewards '[{{function: ...}}]'] [options]")
    folder = Path(source)
    recipe = folder / "config.yaml"
    is_run = bool(source) and (recipe.is_file() or (folder / "rollouts").is_dir())
    defaults = ["--config", str(recipe)] if is_run else []
    config = parse(ScoreConfig, [*defaults, *options], COMMAND).config
    check_score(config, source, is_run=is_run)
    with reader_may_leave():
        if is_run:
            _score_run(config, parse(TrainConfig, defaults, COMMAND).config, folder)
        else:
            _score_file(config, source)


def _score_file(config: ScoreConfig, source: str) -> None:
    # The settings are sound: now the imports that take seconds.
    from hybrid_grpo.data.batch import Rollout, Scores
    from hybrid_grpo.data.completions import read_completions
    from hybrid_grpo.rewards.loading import load_rewards
    from hybrid_grpo.rewards.scoring import Rewards

    loaded = load_rewards(config.rewards, config.scoring)
    groups = read_completions(source, config.data, sys.stdin.buffer, _tokenizer(loaded, config.policy.model))
    callers = {reward.name: _RecordingCaller(reward.caller) for reward in loaded}
    loaded = [replace(reward, caller=callers[reward.name]) for reward in loaded]
    rewards = Rewards(loaded, replace(config.scoring, max_wait_s=_FOREVER_S))
    rewards.load_models()
    everything: list[Scores] = []
    first_failures: dict[str, str] = {}
    console = Console(stderr=True, highlight=False)
    shown = console.is_terminal and not (config.score.output in (None, "-") and sys.stdout.isatty())
    starts = range(0, len(groups), _ROWS)
    with json_lines(config.score.output or "-", "score.output") as write:
        for start in track(starts, "rows", console=console, transient=True, disable=not shown):
            lines: list[dict[str, Any]] = []
            batch = groups[start : start + _ROWS]
            # Groups that are scored together are of one size.
            for size in sorted({group.num_generations for group in batch}):
                rollout = reduce(Rollout.joined, (group for group in batch if group.num_generations == size))
                everything.append(rewards.score(rollout.row_prompts, rollout.completions, size))
                lines += _lines(rollout, everything[-1])
            for line in sorted(lines, key=lambda line: (line["id"], line["sample"])):
                write(line)
                for name, why in line["failed"].items():
                    first_failures.setdefault(name, f"row {line['id']}, sample {line['sample']}: {why}")
    scores = reduce(Scores.joined, everything)
    console.print(_table({name: _summary(scores, name, callers[name].calls) for name in rewards.names}))
    for name, where in first_failures.items():
        console.print(f"{name}: first failure at {where}", markup=False, soft_wrap=True)
    refuse(
        all(value_B.isnan().all() for value_B in scores.by_function.values()),
        "rewards: nothing could be scored: no function gave a number for any completion",
    )


class _RecordingCaller:
    """Passes calls on to another caller and keeps them, to say later how long they took."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.calls: list[Future[Reply]] = []

    def __call__(self, call: RewardCall) -> Future[Reply]:
        """Call the function."""
        self.calls.append(self._caller(call))
        return self.calls[-1]


def _lines(rollout: Rollout, scores: Scores) -> list[dict[str, Any]]:
    """[B], what is written about each completion."""
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
    """What one function said about all completions, and how fast, by the labels that are shown."""
    from hybrid_grpo.data.batch import RewardStatus
    from hybrid_grpo.rewards.workers.pool import busy_seconds

    status_B, value_B = scores.status[name], scores.by_function[name]
    value_N = value_B[~value_B.isnan()]
    replies = [call.result() for call in calls]
    spans = [end_s - start_s for reply in replies for start_s, end_s in reply.spans]
    busy_s = busy_seconds(replies) or math.nan
    return {
        "scored": len(value_N),
        "does not apply": int((status_B == RewardStatus.NOT_APPLICABLE).sum()),
        "failed": int((status_B >= RewardStatus.FAILED).sum()),
        "  out of time": int((status_B == RewardStatus.TIMED_OUT).sum()),
        "mean": value_N.mean().item(),
        "standard deviation": value_N.std().item() if len(value_N) > 1 else math.nan,
        "share of 0": (value_N == 0).double().mean().item(),
        "share of 1": (value_N == 1).double().mean().item(),
        "calls": len(spans),
        "slowest call, s": max(spans, default=math.nan),
        "calls a second": len(spans) / busy_s,
        "completions a second": len(value_B) / busy_s,
    }


def _score_run(config: ScoreConfig, before: TrainConfig, folder: Path) -> None:
    # The settings are sound: now the imports that take seconds.
    from hybrid_grpo.data.completions import read_step, saved_files
    from hybrid_grpo.rewards.loading import load_rewards
    from hybrid_grpo.rewards.scoring import Rewards
    from hybrid_grpo.run.comparison import Comparison

    files = _chosen(saved_files(folder), config.score.steps, folder)
    loaded = load_rewards(config.rewards, config.scoring)
    model = str(folder / "model") if (folder / "model").is_dir() else before.policy.model
    tokenizer = _tokenizer(loaded, model)
    rewards = Rewards(loaded, replace(config.scoring, max_wait_s=_FOREVER_S), tokenizer)
    rewards.load_models()
    # A function is compared with the old one of its name, else with the one that told right from wrong.
    old = [reward_name(reward) for reward in before.rewards]
    compared_with = {name: name if name in old else before.eval.outcome or old[0] for name in rewards.names}
    threshold = before.eval.threshold if config.score.threshold is None else config.score.threshold
    comparison = Comparison(config, compared_with, (before.eval.threshold, threshold), config.score.limit)
    changed, needs_tokens = 0, any(reward.interface.accepts("completion_ids") for reward in loaded)
    bar = Console(stderr=True)
    for file in track(files, "steps", console=bar, transient=True, disable=not bar.is_terminal):
        saved = read_step(file, tokenizer)
        rollout = saved.rollout
        scores = rewards.score(rollout.row_prompts, rollout.completions, rollout.num_generations, saved.step)
        comparison.add(saved, scores)
        changed += len(rollout.completions) - saved.retokenized
        needs_tokens = needs_tokens or scores.steps is not None
    notes = []
    if before.grpo.beta and before.grpo.kl_in == "reward":
        notes.append("the run's advantages include the KL (grpo.kl_in reward), which is not saved: the new ones do not")
    if needs_tokens and tokenizer is None:
        notes.append(f"there is no tokenizer in {model}: completion_ids are all -1, and steps of a text count as one")
    elif needs_tokens and changed:
        notes.append(
            f"tokens are made from the texts again: for {changed} completions this gives more or fewer than were"
            " sampled, and completion_ids were cut or filled up with -1"
        )
    settings = [asdict(reward) for reward in config.rewards]
    report = {"run": str(folder), "rewards": settings, "notes": notes, **comparison.report()}
    worst = comparison.disagreements()
    path = Path(config.score.output or folder / "score" / f"{'+'.join(rewards.names)[:100]}.json")
    path.parent.mkdir(exist_ok=True)
    replace_text(path, json.dumps(json_safe(report), indent=2, ensure_ascii=False) + "\n")
    entries = (json.dumps(json_safe(entry), ensure_ascii=False) for entry in worst)
    replace_text(path.with_suffix(".disagreements.jsonl"), "".join(f"{entry}\n" for entry in entries))
    _print_comparison(report, worst)
    print(f"\n{path}\n{path.with_suffix('.disagreements.jsonl')}")


def _chosen(files: dict[int, Path], steps: str | None, folder: Path) -> list[Path]:
    refuse(not files, f"{folder} has no rollouts: they are written by a training run with log.rollouts_every above 0")
    first, dash, last = (steps or "-").partition("-")
    low, high = int(first or 0), int(last or max(files)) if dash else int(first)
    chosen = [path for step, path in files.items() if low <= step <= high]
    refuse(not chosen, f"score.steps {steps} has no rollouts: the run has those of steps {min(files)} to {max(files)}")
    return chosen


def _print_comparison(report: dict[str, Any], worst: list[dict[str, Any]]) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    first, last, count = report["steps"]
    console.print(
        f"{report['run']}: {report['completions']:,} completions of {count} steps, {first} to {last};"
        f" right is {report['threshold_before']:g} before, {report['threshold_now']:g} now"
    )
    console.print(_table({**report["functions"], "weighted sum": report["reward"]}))
    console.print(_table({"groups and advantages": report["advantages"]}))
    for entry in worst[:_SHOWN]:
        console.print(
            "\nstep {step}, group {group}, sample {sample}: {compared_with} {before:g} -> {function} {now:g}"
            " ({reason}), advantage {advantage_before:.3f} -> {advantage_now:.3f}".format(**entry)
        )
        for name in ("prompt", "completion"):
            text = repr(entry[name])
            console.print(f"  {name}: {text if len(text) <= _TEXT_SHOWN else f'...{text[-_TEXT_SHOWN:]}'}")
    for note in report["notes"]:
        console.print(f"\nnote: {note}")


def _table(columns: dict[str, dict[str, Any]]) -> Table:
    """A column for every record, by name, and a row for every key of any record."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for key in dict.fromkeys(key for column in columns.values() for key in column):
        table.add_row(key.replace("_", " "), *(_shown(column.get(key)) for column in columns.values()))
    return table


def _shown(value: Any) -> str:
    """Undefined numbers, such as a correlation with a constant, are left blank."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.3f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _tokenizer(rewards: Sequence[Reward], model: str) -> Any:
    """The tokenizer of the model, where the model is a folder or a function names `completion_ids`; else None.

    Raises:
        UserError: a function names `completion_ids`, and there is no tokenizer.
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
