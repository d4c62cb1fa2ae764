"""What `run.resume` means for a folder: which checkpoint a run goes on from, and what it refuses to go on from.

Nothing is changed here. A run that has numbers is never begun over: what cannot be gone on with is refused in one line.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hybrid_grpo.config import ModelRunConfig, to_dict
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.features import feature_sections
from hybrid_grpo.records.json_lines import parse_step
from hybrid_grpo.run.fingerprints import CODE, REWARDS
from hybrid_grpo.run.saving.checkpoint import Checkpoint, Checkpoints
from hybrid_grpo.run.saving.manifest import Damaged
from hybrid_grpo.run.stage import Stage

FREE = (
    *("run.name", "run.dir", "run.steps", "run.resume", "run.allow_changes"),
    *("run.stop_after", "run.grace_s", "run.stall_minutes"),
    *("guard.*", "alarms.*", "log.*", "checkpoint.*", "scoring.*"),
    *("eval.every", "eval.name", "eval.num_generations", "eval.temperature", "eval.top_p"),
    *("eval.max_completion_tokens", "eval.sets", "eval.best", "eval.patience"),
    *("data.eval_path", "data.eval_split", "data.eval_limit"),
    *("engine.zero_stage", "engine.offload_optimizer", "engine.adam", "engine.timeout_minutes", "engine.deepspeed.*"),
    *("policy.attn_implementation", "policy.shared_prefix", "policy.gradient_checkpointing"),
    *("policy.micro_batch_tokens", "policy.pickled_weights"),
    *("rollout.max_slots", "rollout.prefill_tokens", "rollout.cache_gb", "rollout.keep_cache"),
)
"""Settings that may change between a checkpoint and the run that goes on from it: they decide how the run is computed,
kept and shown. All others decide what is learned from which data; they may change only with run.allow_changes."""
_OF_ROLL_BACKS = ("guard.non_finite", "guard.patience", "guard.lr_factor")
"""Settings of the guard that decide what is learned where a run may go back; so do alarms that skip or go back."""
_FREE_OF_REWARD = ("timeout_s", "batch_size", "isolation")
"""The same of a reward function."""


@dataclass(frozen=True)
class Start:
    """Where a run starts."""

    checkpoint: Checkpoint | None = None
    """What it goes on from; None: from the beginning."""
    lines: tuple[str, ...] = ()
    """The lines of metrics.jsonl before it."""
    forks: bool = False
    """Whether the checkpoint is of another run."""
    damaged: bool = False
    """Whether the run's metrics.jsonl lacks some before it, or has others."""

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.checkpoint.manifest.step if self.checkpoint else 0


def find_start(config: ModelRunConfig, folder: Path, checkpoints: Checkpoints, say: Callable[[str], None]) -> Start:
    """Where the run of `folder` starts, by its setting `run.resume`, and by what the inputs of `checkpoints` are now;
    `say` is told what was passed over and what has changed. Raises UserError. Collective."""
    resume, name = config.run.resume, config.run.name
    numbers = folder / "metrics.jsonl"
    has_numbers = _has_steps(numbers)
    another = "another --run.name"
    if resume == "never":
        refuse(
            bool(checkpoints.tags()) or numbers.exists(),
            f"run.name {name}: {folder} holds a run already: pass --run.resume auto to go on with it, or {another}",
        )
        return Start()
    if resume == "auto":
        checkpoint, passed_over = checkpoints.newest_whole()
        for damage in passed_over:
            say(f"WARNING: checkpoint {checkpoints.folder}/{damage}; it is passed over")
        if checkpoint is None:
            refuse(
                bool(passed_over),
                f"run.resume auto: no checkpoint in {checkpoints.folder} is whole: {'; '.join(passed_over[:3])}: put"
                f" one back as it was, or start anew with {another}",
            )
            refuse(
                has_numbers or (folder / "model").exists(),
                f"run.resume auto: {folder} holds the results of a run and no checkpoint to go on from: start anew with"
                f" {another}",
            )
            return Start()
        forks = False
    else:
        try:
            checkpoint = checkpoints.verify(Path(resume).absolute())
        except Damaged as damage:
            raise UserError(f"run.resume {resume}: {damage}: give the folder of a whole checkpoint") from None
        forks = checkpoint.folder.parent.resolve() != checkpoints.folder.resolve()
        refuse(
            forks and (bool(checkpoints.tags()) or has_numbers),
            f"run.resume {resume} is a checkpoint of another run, and {folder} holds a run already: give {another}",
        )
        numbers = checkpoint.folder.parent.parent / "metrics.jsonl"
    step = checkpoint.manifest.step
    changed = changes(checkpoint.manifest.settings, config)
    bound = [text for setting, text in changed.items() if not is_free(setting, config, checkpoint.manifest.settings)]
    refuse(
        bool(bound) and not config.run.allow_changes,
        f"run.resume {resume}: settings that decide on learning have changed since the checkpoint of step {step}:"
        f" {', '.join(bound)}: set them as they were, start anew with {another}, or pass --run.allow_changes true",
    )
    before, now = checkpoint.manifest.inputs, checkpoints.inputs
    others = [name for name in now if name in before and now[name] != before[name]]
    bound_inputs = [name for name in others if not name.startswith(CODE)]
    refuse(
        bool(bound_inputs) and not config.run.allow_changes,
        f"run.resume {resume}: inputs have changed since the checkpoint of step {step}: {', '.join(bound_inputs)}: put"
        f" them back as they were, start anew with {another}, or pass --run.allow_changes true",
    )
    refuse(
        step > config.run.steps,
        f"run.steps {config.run.steps}: checkpoint {checkpoint.folder} has {step} steps already: set run.steps to"
        f" {step} or more",
    )
    if changed or others:
        say(f"changed since the checkpoint: {', '.join([*changed.values(), *others])}")
    lines = lines_before(numbers, step)
    wrong = _damage(numbers, lines, step)
    if wrong:
        say(f"WARNING: {numbers}: {wrong}; the run goes on without them")
    return Start(checkpoint, tuple(lines), forks, bool(wrong and not forks))


def load_stage(stage: Stage, checkpoints: Checkpoints, checkpoint: Checkpoint) -> dict[str, Any]:
    """Bring a stage to where it was when a checkpoint was written, or the run went back to it; return all that the
    checkpoint holds of this rank. Collective."""
    state = checkpoints.load(stage.policy.engine, checkpoint, stage.all_shards)
    stage.policy.load_state_dict(state["policy"])
    for name, part in stage.parts.items():
        # Settings that were added with run.allow_changes may need what the checkpoint does not have.
        refuse(name not in state, f"run.resume: {checkpoint.folder} was made without {name}: take its settings out")
        part.load_state_dict(state[name])
    if (lr_scale := checkpoint.manifest.lr_scale) is not None:
        stage.policy.lr_scale = lr_scale
        for model in stage.others:
            model.lr_scale = lr_scale
    return state


def settings_of(config: ModelRunConfig) -> dict[str, Any]:
    """The settings by their dotted names, as a manifest holds them."""
    settings: dict[str, Any] = {}
    for section, values in to_dict(config).items():
        if section == "rewards":
            settings[section] = [
                {name: value for name, value in reward.items() if name not in _FREE_OF_REWARD} for reward in values
            ]
        elif isinstance(values, list):
            settings[section] = values
        else:
            settings |= {f"{section}.{name}": value for name, value in values.items()}
    sections = settings.pop("engine.deepspeed")
    settings |= {f"engine.deepspeed.{name}": value for name, value in sections.items()}
    # As JSON gives them back.
    return dict(json.loads(json.dumps(settings, default=str)))


def identity(config: ModelRunConfig, checkpoints: Checkpoints) -> str:
    """All that decides what is sampled in a step: the settings and inputs that may not change, and how often the run
    has gone back. What was sampled before a reward function was mended is as good as before."""
    bound = {name: value for name, value in settings_of(config).items() if not is_free(name, config)}
    inputs = {name: value for name, value in checkpoints.inputs.items() if not name.startswith(REWARDS)}
    return json.dumps([bound, inputs, checkpoints.rollbacks], sort_keys=True)


def changes(saved: dict[str, Any], config: ModelRunConfig) -> dict[str, str]:
    """Settings that differ from a checkpoint's, by name, with both values. One that the checkpoint does not know had
    its default."""
    before, now = {**settings_of(type(config)()), **saved}, settings_of(config)
    return {
        name: f"{name} {_short(before.get(name))} -> {_short(now.get(name))}"
        for name in {**now, **before}
        if before.get(name) != now.get(name) and name not in ("run.resume", "run.allow_changes", "run.dir", "run.name")
    }


def lines_before(path: Path, step: int) -> list[str]:
    """The lines of metrics.jsonl up to a step, each of a later step than the one before. Others, and such as cannot be
    read, are left out."""
    lines: list[str] = []
    last = -1
    for line in path.read_bytes().split(b"\n")[:-1] if path.is_file() else ():
        number = _step_of(line)
        if number is not None and last < number <= step:
            last = number
            lines.append(line.decode() + "\n")
    return lines


def _step_of(line: bytes) -> int | None:
    return (parse_step(line) or {}).get("step")


def _damage(path: Path, lines: list[str], step: int) -> str:
    """What is wrong with a metrics.jsonl that has these lines up to a step; empty where nothing is."""
    found = {_step_of(line.encode()) for line in lines}
    missing = [number for number in range(1, step + 1) if number not in found]
    if missing:
        return f"it lacks the numbers of step {', '.join(map(str, missing[:5]))}{', ...' if missing[5:] else ''}"
    return "" if not lines or path.read_bytes().startswith("".join(lines).encode()) else "some of its lines are damaged"


def _has_steps(path: Path) -> bool:
    """Whether metrics.jsonl has more than what is measured before the first step. A line that a crash or a full disk
    left incomplete is none; one that cannot be read is taken for a step."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else ()
    return any(_step_of(line) != 0 for line in lines)


def is_free(setting: str, config: ModelRunConfig, saved: dict[str, Any] | None = None) -> bool:
    """Whether a setting may differ from that of a checkpoint, which are `saved`; see `FREE`."""
    each = [settings_of(config), saved or {}]
    if setting.startswith("alarms.") and any(_acts(settings.get(setting)) for settings in each):
        return False
    if setting in _OF_ROLL_BACKS and any(_rolls_back(settings) for settings in each):
        return False
    if setting == "run.steps" and config.policy.lr_schedule != "constant":
        # The schedule ends with the last step.
        return False
    if setting == "engine.deepspeed.optimizer":
        return False
    of_features = [pattern for feature in feature_sections().values() for pattern in feature.free]
    return any(fnmatch(setting, pattern) for pattern in (*FREE, *of_features))


def _acts(alarm: Any, actions: tuple[str, ...] = ("skip", "roll_back")) -> bool:
    """Whether an alarm, or one of `alarms.numbers`, decides what is learned."""
    if not isinstance(alarm, dict):
        return False
    return alarm.get("action") in actions or any(_acts(one, actions) for one in alarm.values())


def _rolls_back(settings: dict[str, Any]) -> bool:
    alarms = (value for name, value in settings.items() if name.startswith("alarms."))
    return settings.get("guard.non_finite") == "roll_back" or any(_acts(alarm, ("roll_back",)) for alarm in alarms)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
