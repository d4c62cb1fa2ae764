"""`replay-rewards`: what other reward functions say of the rollouts of a run. No model, no ranks.

Writes NAME.json and NAME.disagreements.jsonl into RUN_FOLDER/replay, and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

from hybrid_grpo.commands.offline import Line, patient, table, tokenizer_for
from hybrid_grpo.config import ReplayConfig, TrainConfig, reward_name
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.parsing import leading_argument, parse
from hybrid_grpo.config.reward_checks import check_replay
from hybrid_grpo.run.files import json_safe, replace_text

if TYPE_CHECKING:
    from hybrid_grpo.rewards.loading import Reward
    from hybrid_grpo.run.replay import Disagreement

COMMAND = "replay-rewards RUN_FOLDER"
SHOWN = 3
"""Disagreements that are printed."""
TEXT_SHOWN = 300
"""Characters of a prompt or completion that are printed, from its end."""


def run(arguments: list[str]) -> None:
    """Parse, score every step again, print and write what has changed."""
    name, options = leading_argument(arguments, f"hybrid-grpo {COMMAND} [--rewards '[{{function: ...}}]'] [options]")
    if not name:
        parse(ReplayConfig, options, COMMAND)
    folder = Path(name)
    recipe = folder / "config.yaml"
    refuse(not recipe.is_file(), f"{folder} is not the folder of a training run: it has no config.yaml")
    refuse(
        not any((folder / "rollouts").glob("step_*.jsonl")),
        f"{folder} has no rollouts: they are written by a training run with log.rollouts_every above 0",
    )
    before = parse(TrainConfig, ["--config", str(recipe)], COMMAND).config
    config = parse(ReplayConfig, ["--config", str(recipe), *options], COMMAND).config
    check_replay(config)

    # The settings are sound: now the imports that take seconds.
    from hybrid_grpo.data.saved import read_step, saved_files
    from hybrid_grpo.rewards.loading import load_rewards
    from hybrid_grpo.rewards.scoring import Rewards
    from hybrid_grpo.run.replay import Replay

    files = _chosen(saved_files(folder), config.replay.steps)
    loaded = load_rewards(config.rewards, config.scoring)
    notes = _notes(before)
    tokenizer = _tokenizer(folder, before, loaded, notes)
    rewards = Rewards(loaded, patient(config.scoring), tokenizer)
    rewards.load_models()
    thresholds = before.eval.threshold, config.replay.threshold
    replay = Replay(
        config,
        _compared_with(before, rewards.names),
        thresholds[0],
        thresholds[0] if thresholds[1] is None else thresholds[1],
        config.replay.limit,
    )
    rows = retokenized = 0
    looks_at_ids, scores_steps = any(reward.interface.accepts("completion_ids") for reward in loaded), False
    bar = Console(stderr=True)
    for file in track(files, "steps", console=bar, transient=True, disable=not bar.is_terminal):
        saved = read_step(file, tokenizer)
        rollout = saved.rollout
        with rewards.stream(rollout.prompts, rollout.num_generations, saved.step) as stream:
            for row, completion in enumerate(rollout.completions):
                stream.add(row // rollout.num_generations, row % rollout.num_generations, completion)
            scores = stream.scores()
        replay.add(saved, scores)
        scores_steps = scores_steps or scores.steps is not None
        rows, retokenized = rows + len(rollout.completions), retokenized + saved.retokenized
    if scores_steps and tokenizer is None:
        notes.append("steps that are pieces of the text count as one step: the run's tokenizer is not there")
    if (looks_at_ids or scores_steps) and tokenizer is not None and retokenized < rows:
        notes.append(
            f"tokens are made of the texts again: of {rows - retokenized} of {rows} completions they are"
            " more or less than were sampled, and completion_ids were cut or filled up with -1"
        )
    report = {
        "run": str(folder),
        "rewards": [asdict(reward) for reward in config.rewards],
        "notes": notes,
        **replay.report(),
    }
    worst = replay.disagreements()
    name = config.replay.output or "+".join(rewards.names)[:100]
    paths = _write(folder / "replay", name, report, worst)
    _print(report, worst, paths)


def _chosen(files: dict[int, Path], steps: str | None) -> list[Path]:
    first, dash, last = (steps or "-").partition("-")
    low, high = int(first or 0), int(last) if last else None if dash else int(first)
    chosen = [path for step, path in files.items() if low <= step and (high is None or step <= high)]
    refuse(
        not chosen, f"replay.steps {steps} has no rollouts: those of the run are of steps {min(files)} to {max(files)}"
    )
    return chosen


def _compared_with(before: TrainConfig, names: list[str]) -> dict[str, str]:
    """The old function of the same name, else the one that told right from wrong."""
    old = [reward_name(reward) for reward in before.rewards]
    outcome = before.eval.outcome or old[0]
    return {name: name if name in old else outcome for name in names}


def _notes(before: TrainConfig) -> list[str]:
    if before.grpo.beta and before.grpo.kl_in == "reward":
        return [
            "grpo.kl_in is reward: the run's advantages have the KL of the completions in them, which rollouts do not"
            " have; the new ones are without it"
        ]
    return []


def _tokenizer(folder: Path, before: TrainConfig, rewards: list[Reward], notes: list[str]) -> Any:
    exported = folder / "model"
    place = str(exported) if exported.is_dir() else before.policy.model
    tokenizer = tokenizer_for(rewards, place, "the tokenizer of the run", steps=True)
    guessing = [reward.name for reward in rewards if reward.interface.accepts("completion_ids")]
    if tokenizer is None and guessing:
        notes.append(f"{', '.join(guessing)}: completion_ids are -1 for every token: there is no tokenizer in {place}")
    return tokenizer


def _write(folder: Path, name: str, report: dict[str, Any], worst: list[Disagreement]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{name}.json", folder / f"{name}.disagreements.jsonl"]
    replace_text(paths[0], json.dumps(json_safe(report), indent=2, ensure_ascii=False) + "\n")
    lines = (json.dumps(json_safe(asdict(entry)), ensure_ascii=False) for entry in worst)
    replace_text(paths[1], "".join(f"{line}\n" for line in lines))
    return paths


def _field(label: str, name: str) -> Line:
    return label, lambda record: record.get(name)


_FUNCTION_LINES: list[Line] = [
    _field("compared with", "compared_with"),
    _field("completions compared", "rows"),
    _field("does not apply now", "none_now"),
    _field("failed now", "failed_now"),
    _field("mean before", "mean_before"),
    _field("mean now", "mean_now"),
    _field("right by both", "both_right"),
    _field("right before only", "only_before"),
    _field("right now only", "only_now"),
    _field("wrong by both", "both_wrong"),
    _field("agreement", "agreement"),
    _field("Cohen's kappa", "kappa"),
    _field("Pearson", "pearson"),
    _field("Spearman", "spearman"),
    _field("with length before", "length_before"),
    _field("with length now", "length_now"),
]
_STEP_LINES: list[Line] = [
    ("reward before", lambda part: part["reward"]["mean_before"]),
    ("reward now", lambda part: part["reward"]["mean_now"]),
    ("groups", lambda part: part["advantages"]["groups"]),
    ("teach nothing before", lambda part: part["advantages"]["zero_std_before"]),
    ("teach nothing now", lambda part: part["advantages"]["zero_std_now"]),
    ("advantages, Pearson", lambda part: part["advantages"]["pearson"]),
    ("  the same", lambda part: part["advantages"]["equal_frac"]),
    ("  of other sign", lambda part: part["advantages"]["sign_flips_frac"]),
    ("  gone", lambda part: part["advantages"]["vanished_frac"]),
    ("  new", lambda part: part["advantages"]["appeared_frac"]),
]


def _print(report: dict[str, Any], worst: list[Disagreement], paths: list[Path]) -> None:
    console = Console(highlight=False)
    first, last, count = report["steps"]
    console.print(
        f"{report['run']}: {report['completions']:,} completions of {count} steps, {first} to {last};"
        f" right is {report['threshold_before']:g} before, {report['threshold_now']:g} now",
        markup=False,
        soft_wrap=True,
    )
    console.print(table({**report["functions"], "weighted sum": report["reward"]}, _FUNCTION_LINES))
    console.print(table({"all steps": report, **report["by_steps"]}, _STEP_LINES))
    for entry in worst[:SHOWN]:
        console.print(
            f"\nstep {entry.step}, group {entry.group}, sample {entry.sample}: {entry.compared_with} {entry.before:g}"
            f" -> {entry.function} {entry.now:g} ({entry.reason}), advantage {entry.advantage_before:.3f} ->"
            f" {entry.advantage_now:.3f}\n  prompt: {_tail(entry.prompt)}\n  completion: {_tail(entry.completion)}",
            markup=False,
            soft_wrap=True,
        )
    for note in report["notes"]:
        console.print(f"\nnote: {note}", markup=False, soft_wrap=True)
    console.print("\n" + "\n".join(map(str, paths)), markup=False, soft_wrap=True)


def _tail(text: Any) -> str:
    line = repr(text)
    return line if len(line) <= TEXT_SHOWN else f"...{line[-TEXT_SHOWN:]}"
