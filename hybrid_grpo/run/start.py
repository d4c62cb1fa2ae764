"""Decides, by `run.resume` and what is in a run's folder, from which checkpoint a run resumes.

Nothing on disk is changed. A run that has metrics is never overwritten: if it cannot be resumed, a UserError says why.
"""

from dataclasses import dataclass
from pathlib import Path

from hybrid_grpo.config import ModelRunConfig
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.records.json_lines import parse_step
from hybrid_grpo.run.fingerprints import CODE
from hybrid_grpo.run.folder import say
from hybrid_grpo.run.saving.checkpoints import Checkpoint, Checkpoints
from hybrid_grpo.run.saving.manifest import Damaged
from hybrid_grpo.run.settings import changes, is_free, settings_of

_ANOTHER = "another --run.name"


@dataclass(frozen=True)
class Start:
    checkpoint: Checkpoint | None = None
    """The checkpoint to resume from; None: start from the beginning."""
    lines: tuple[str, ...] = ()
    """The lines of metrics.jsonl up to the checkpoint."""
    forks: bool = False
    """Whether the checkpoint belongs to another run."""
    rewinds: bool = False
    """Whether the user has named a checkpoint of this run, so that what came after it is abandoned."""
    is_damaged: bool = False
    """Whether lines up to the checkpoint are missing from the run's own metrics.jsonl, or damaged."""

    @property
    def step(self) -> int:
        return self.checkpoint.manifest.step if self.checkpoint else 0


def find_start(config: ModelRunConfig, folder: Path, checkpoints: Checkpoints) -> Start:
    """Return where the run in `folder` starts, by `run.resume` and the current fingerprints `checkpoints.inputs`; print
    what was passed over and what has changed. Raise UserError if the run must not start. Collective."""
    resume, metrics, forks = config.run.resume, folder / "metrics.jsonl", False
    if resume == "never":
        refuse(
            bool(checkpoints.tags()) or metrics.exists(),
            f"run.name {folder.name}: {folder} holds a run already: pass --run.resume auto to continue with it, or"
            f" {_ANOTHER}",
        )
        return Start()
    if resume == "auto":
        newest = _newest(folder, checkpoints)
        if newest is None:
            return Start()
        checkpoint = newest
    else:
        checkpoint, forks = _named(resume, folder, checkpoints)
        metrics = checkpoint.folder.parent.parent / "metrics.jsonl"
    step = checkpoint.manifest.step
    changed = _checked_changes(config, checkpoint, checkpoints.inputs)
    refuse(
        step > config.run.steps,
        f"run.steps {config.run.steps}: checkpoint {checkpoint.folder} is later: set run.steps to {step} or more",
    )
    if changed:
        say(f"changed since the checkpoint: {', '.join(changed)}")
    lines = lines_before(metrics, step)
    damage = _damage(metrics, lines, step)
    if damage:
        say(f"WARNING: {metrics}: {damage}; the run continues without them")
    return Start(checkpoint, tuple(lines), forks, resume != "auto" and not forks, bool(damage and not forks))


def _newest(folder: Path, checkpoints: Checkpoints) -> Checkpoint | None:
    checkpoint, passed_over = checkpoints.newest_whole()
    for damage in passed_over:
        say(f"WARNING: checkpoint {checkpoints.folder}/{damage}; it is passed over")
    if checkpoint is None:
        refuse(
            bool(passed_over),
            f"run.resume auto: no checkpoint in {checkpoints.folder} is intact: {'; '.join(passed_over[:3])}: put one"
            f" back as it was, or start anew with {_ANOTHER}",
        )
        refuse(
            _has_steps(folder / "metrics.jsonl") or (folder / "model").exists(),
            f"run.resume auto: {folder} holds the results of a run and no checkpoint to continue from: start anew with"
            f" {_ANOTHER}",
        )
    return checkpoint


def _named(resume: str, folder: Path, checkpoints: Checkpoints) -> tuple[Checkpoint, bool]:
    """Return the checkpoint that `run.resume` names, and whether it belongs to another run."""
    try:
        checkpoint = checkpoints.verify(Path(resume).absolute())
    except Damaged as damage:
        raise UserError(f"run.resume {resume}: {damage}: give the folder of an intact checkpoint") from None
    forks = checkpoint.folder.parent.resolve() != checkpoints.folder.resolve()
    refuse(
        forks and (bool(checkpoints.tags()) or _has_steps(folder / "metrics.jsonl")),
        f"run.resume {resume} is a checkpoint of another run, and {folder} holds a run already: give {_ANOTHER}",
    )
    return checkpoint, forks


def _checked_changes(config: ModelRunConfig, checkpoint: Checkpoint, inputs: dict[str, str]) -> list[str]:
    """Return the changes of settings and inputs since a checkpoint. Refuse some, unless run.allow_changes is true."""
    manifest = checkpoint.manifest
    changed = changes(manifest.settings, config)
    others = [name for name in inputs if name in manifest.inputs and inputs[name] != manifest.inputs[name]]
    each = [settings_of(config), manifest.settings]
    bound = [text for name, text in changed.items() if not is_free(name, config, each)]
    for what, names, were in (
        ("settings that affect what is learned", bound, "set them as they were"),
        ("inputs", [name for name in others if not name.startswith(CODE)], "put them back as they were"),
    ):
        refuse(
            bool(names) and not config.run.allow_changes,
            f"run.resume {config.run.resume}: {what} have changed since the checkpoint of step {manifest.step}:"
            f" {', '.join(names)}: {were}, start anew with {_ANOTHER}, or pass --run.allow_changes true",
        )
    return [*changed.values(), *others]


def lines_before(path: Path, step: int) -> list[str]:
    """Return the lines of metrics.jsonl up to a step. Lines out of order and unreadable lines are left out."""
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
    """Return what is wrong with the metrics.jsonl from which `lines` up to a step were read; empty if nothing is."""
    found = {_step_of(line.encode()) for line in lines}
    missing = [number for number in range(1, step + 1) if number not in found]
    if missing:
        return f"it lacks the numbers of step {', '.join(map(str, missing[:5]))}{', ...' if missing[5:] else ''}"
    return "" if not lines or path.read_bytes().startswith("".join(lines).encode()) else "some of its lines are damaged"


def _has_steps(path: Path) -> bool:
    """Return whether metrics.jsonl has the metrics of any step, other than step 0. An incomplete last line, left by a
    crash or a full disk, does not count; a line that cannot be read counts as a step."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else ()
    return any(_step_of(line) != 0 for line in lines)
