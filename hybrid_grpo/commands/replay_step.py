"""`replay-step`: repeats a step of a run from the checkpoint before it, and shows it token by token.

The trainer itself repeats the step on the run's data; this module has no part of the algorithm, and changes no files of
the run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_grpo.commands.configs import ReplayConfig
from hybrid_grpo.commands.train import make_reference, make_trainer, planned_memory, read_inputs
from hybrid_grpo.config.checks import check_train
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.kept_code import with_kept_code
from hybrid_grpo.config.parsing import leading_argument, parse
from hybrid_grpo.config.recipes import read_recipe
from hybrid_grpo.records.files import json_safe, replace_text
from hybrid_grpo.records.json_lines import read_jsonl

if TYPE_CHECKING:
    import pyarrow

    from hybrid_grpo.commands.replays.saved_rollouts import SavedRollouts
    from hybrid_grpo.run.inputs import RunInputs
    from hybrid_grpo.run.saving.checkpoints import Checkpoint, Checkpoints
    from hybrid_grpo.trainer import Trainer

COMMAND = "replay-step RUN STEP"
_TOLD = (
    *("policy/loss", "policy/grad_norm", "policy/entropy", "policy/kl", "policy/ratio_max", "policy/clip_frac_low"),
    *("policy/clip_frac_high", "reward/mean", "completion/length_mean", "parity/logp_abs_diff_max"),
)
"""The metrics of the replayed step that are shown next to the logged ones."""
_DECIDE = ("policy/loss", "policy/grad_norm")
"""The metrics by which a replayed step is compared with the logged one."""
_SAMPLES = ("grpo.dynamic_sampling", "grpo.max_resamples", "grpo.ref_every", "grpo.ref_mix")
"""Settings of `grpo` that may not change, since they decide what was sampled or what happened before the step."""

Logged = Mapping[int, Mapping[str, Any]]
"""The lines of metrics.jsonl by step."""


def run(arguments: list[str]) -> None:
    """Parse the arguments, repeat the run from a checkpoint to the step, and report what the loss of the step saw."""
    asked = next((argument for argument in arguments if argument in ("-h", "--help")), "")
    if asked:
        parse(ReplayConfig, arguments[arguments.index(asked) :], COMMAND)
    usage = f"{COMMAND} [options]; STEP is the number of a step, from 1"
    source, options = leading_argument(arguments[:1] + arguments[2:], usage)
    number = "".join(arguments[1:2])
    refuse(not number.isdecimal() or int(number) < 1, f"usage: hybrid-grpo {usage}")
    folder = Path(source)
    for name in ("config.yaml", "metrics.jsonl"):
        refuse(not (folder / name).is_file(), f"{folder} is not the folder of a run: it has no {name}")
    recipe = folder / "config.yaml"
    other = next((name for name in ("sft", "reward") if name in read_recipe(recipe)), "")
    refuse(other != "", f"{folder} is a run of {other}: replay-step is for runs of train")
    base, config = (parse(ReplayConfig, ["--config", str(recipe), *more], COMMAND).config for more in ([], options))
    replay(folder, int(number), base, config)


def replay(folder: Path, step: int, base: ReplayConfig, config: ReplayConfig) -> None:
    """Repeat a step of the run in `folder`, and write the inputs of its loss to files. `base` has the run's settings,
    and `config` those for the repeated step. Raises UserError. Collective."""
    start = time.perf_counter()
    logged = {line["step"]: line for line in read_jsonl(folder / "metrics.jsonl")}
    refuse(step not in logged, f"{folder} has no step {step}: it has steps 1 to {max(logged, default=0)}")
    for settings in (base, config):
        check_train(settings, int(os.environ.get("WORLD_SIZE", "1")))
    waits = base.policy_waits
    refuse(step <= waits, f"step {step} is one of the first {waits}, in which the policy does not learn yet")
    refuse(bool(logged[step].get("policy/skipped_update")), f"step {step} was skipped by an alarm: nothing was learned")
    refuse(
        base.rollout.environment is not None and config.replay.completions == "saved" != config.replay.rewards,
        "replay.completions saved does not restore the episodes of rollout.environment, which its rewards need: set"
        " replay.rewards to saved too",
    )
    refuse(
        bool(base.rollout.carry) and config.replay.rewards == "saved",
        f"replay.rewards saved: the run carries groups (rollout.carry {base.rollout.carry:g}), and those that a step"
        " carries on have no rewards in it: set replay.rewards to again",
    )
    out = _out(folder, config)

    from hybrid_grpo.commands.replays.replay import compare, same
    from hybrid_grpo.commands.replays.saved_rollouts import SavedRollouts

    changed, saved = _changes(base, config), SavedRollouts(folder / "rollouts")
    _make_folder(out)
    trainer, first, strayed = _arrive(folder, step, base, config, saved, logged)
    table, values = _make(trainer, step, saved)
    if table is None:
        return
    rows = saved.rows(step) if saved.has(step) else {}
    summary = {
        **{
            "run": str(folder),
            "step": step,
            "from": first - 1,
            "strayed_at": strayed,
            "ranks": trainer.plan.world_size,
        },
        **{"settings": list(changed.values()), "same": all(same(values[n], logged[step].get(n)) for n in _DECIDE)},
        "numbers": {n: {"replayed": values[n], "logged": logged[step].get(n)} for n in _TOLD if n in values},
        "completions": compare(table, rows) if rows else None,
        "seconds": round(time.perf_counter() - start, 3),
    }
    target = out / f"step_{step:06d}.parquet"
    _write(target, table, summary)
    print(_told(summary, table, target), flush=True)


def _out(folder: Path, config: ReplayConfig) -> Path:
    """Return the folder for the result; raises UserError if it cannot be used."""
    out = Path(config.replay.out) if config.replay.out else folder / "replay"
    refuse(
        out.resolve() == (folder / "rollouts").resolve(),
        f"replay.out {out} has the files of the run: give another folder",
    )
    refuse(out.exists() and not out.is_dir(), f"replay.out {out} is a file: give a folder")
    return out


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"replay.out {out} cannot be made: {error.strerror}: give another folder") from None


def _changes(base: ReplayConfig, config: ReplayConfig) -> dict[str, str]:
    """Describe each changed setting, by name. Raises UserError if a change affects more than the loss of the step."""
    from hybrid_grpo.run.settings import changes, is_free, settings_of

    changed = {
        name: text
        for name, text in changes(settings_of(base), config).items()
        if not name.startswith("replay.") and not is_free(name, config, settings_of(base))
    }
    for name, text in changed.items():
        refuse(
            name != "rewards" and (not name.startswith("grpo.") or name in _SAMPLES),
            f"{text} cannot be replayed, since it decides what is sampled or what comes before the step: leave it as it"
            " was; other settings of grpo, rewards and scoring may change",
        )
    saves = config.replay.rewards == "saved"
    setting = "replay.rewards saved" if saves else "rewards"
    refuse(
        config.grpo.dynamic_sampling and (saves or "rewards" in changed),
        f"{setting}: with grpo.dynamic_sampling, rewards decide which groups are sampled again, and groups that were"
        " replaced are not saved: keep the rewards of the run, and set replay.rewards to again",
    )
    refuse(
        saves and "rewards" in changed,
        "replay.rewards saved uses the rewards of the run's own functions, and rewards names others: remove one",
    )
    return changed


def _arrive(
    folder: Path, step: int, base: ReplayConfig, config: ReplayConfig, saved: SavedRollouts, logged: Logged
) -> tuple[Trainer, int, int | None]:
    """Repeat the steps before `step`. Collective.

    Returns:
        A trainer that is ready to make `step` with the settings of `config`; the number of the first step after the
        checkpoint; and the number of the first repeated step that did not match the log, or None if all did.
    """
    from hybrid_grpo import engine
    from hybrid_grpo.commands.replays.replay import LoggedSkips, LossRecorder, same
    from hybrid_grpo.commands.replays.saved_rollouts import SavedCompletions, SavedRewards
    from hybrid_grpo.distributed.ranks import world_size
    from hybrid_grpo.run.feature import make_features
    from hybrid_grpo.run.saving.checkpoints import Checkpoints
    from hybrid_grpo.run.saving.saver import load_stage
    from hybrid_grpo.run.stage import RunServices

    device = engine.start(config.engine.timeout_minutes)
    inputs = read_inputs(base)
    others = inputs if config == replace(base, replay=config.replay) else read_inputs(config)
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    checkpoint = _nearest(checkpoints, base, step)
    first = 1 + (checkpoint.manifest.step if checkpoint else 0)
    for setting in ("completions", "rewards"):
        missing = [k for k in range(first, step + 1) if not saved.has(k)]
        refuse(
            getattr(config.replay, setting) == "saved" and bool(missing),
            f"replay.{setting} saved: the run has not saved the tokens of step {(missing or [0])[0]}, which is to be"
            " repeated: set it to again",
        )
    if config.replay.rewards == "saved":
        inputs = replace(inputs, rewards=SavedRewards(inputs.rewards, saved))
        others = replace(others, rewards=SavedRewards(others.rewards, saved))
    plan = check_train(base, world_size())
    features = make_features(base, plan, inputs)
    journal = SavedCompletions(saved, base.run.seed) if config.replay.completions == "saved" else None
    services = RunServices(trace=LossRecorder(config.grpo), alarms=LoggedSkips(logged), journal=journal)
    trainer = make_trainer(base, plan, inputs, features, device, planned_memory(base, plan, inputs, device), services)
    if checkpoint is not None:
        load_stage(trainer, checkpoints, checkpoint)
    _say(f"step {step} of {folder}, from {f'the checkpoint of step {first - 1}' if checkpoint else 'its beginning'}")
    if first < step:
        _say(f"steps {first} to {step - 1}, which come before it, are repeated")
    strayed: int | None = None
    for k in range(first, step):
        trainer.step(k)
        values = trainer.meter.reduce()
        if strayed is None and not all(same(values.get(name), logged.get(k, {}).get(name)) for name in _DECIDE):
            strayed = k
            _say(f"WARNING: step {k} does not have the loss or gradient norm of the run: later steps differ too")
    return _with_settings(trainer, base, config, others), first, strayed


def _nearest(checkpoints: Checkpoints, base: ReplayConfig, step: int) -> Checkpoint | None:
    """Return the newest checkpoint before a step, else the one from which the run began, else None. Collective."""
    from hybrid_grpo.run.saving.manifest import Damaged
    from hybrid_grpo.run.settings import changes, is_free

    checkpoint, passed_over = checkpoints.newest_whole(step)
    for damage in passed_over:
        _say(f"WARNING: checkpoint {checkpoints.folder}/{damage}; it is passed over")
    resume = base.run.resume
    if resume not in ("auto", "never") and Path(resume).absolute().parent.resolve() != checkpoints.folder.resolve():
        try:
            checkpoint = checkpoint or checkpoints.verify(Path(resume).absolute())
        except Damaged as damage:
            raise UserError(
                f"run.resume {resume}, which the run began from: {damage}: put it back, or take a later step"
            ) from None
        refuse(
            checkpoint.manifest.step >= step,
            f"step {step} was made before the run began from {resume}: take a step after {checkpoint.manifest.step}",
        )
    if checkpoint is not None:
        others = changes(with_kept_code(checkpoint.manifest.settings, checkpoints.folder.parent), base).items()
        if changed := [text for name, text in others if not is_free(name, base, checkpoint.manifest.settings)]:
            _say(f"WARNING: the run's settings have changed since that checkpoint: {', '.join(changed)}")
    return checkpoint


def _with_settings(trainer: Trainer, base: ReplayConfig, config: ReplayConfig, inputs: RunInputs) -> Trainer:
    """Return a trainer in the same state as `trainer`, but with the loss settings and rewards of `config`."""
    from hybrid_grpo import engine
    from hybrid_grpo.run.stage import RunServices
    from hybrid_grpo.trainer import Trainer

    if inputs is trainer.inputs or config == replace(base, replay=config.replay):
        return trainer
    inputs.load_models(engine.OffloadedModel)
    policy, plan = trainer.policy, check_train(config, trainer.plan.world_size)
    album, had_one = trainer.inputs.sampler.album, config.grpo.has_reference and base.grpo.has_reference
    reference = trainer.reference if had_one else make_reference(config, policy, album)
    # Only the first trainer's inputs know what tools have done so far.
    inputs = replace(trainer.inputs, rewards=inputs.rewards, outcome=inputs.outcome, objective=inputs.objective)
    features = [feature.with_config(config, inputs) for feature in trainer.features]
    services = RunServices(trace=trainer.trace)
    other = Trainer(config, plan, policy, reference, inputs, trainer.device, features, services)
    for name, part in other.all_parts.items():
        if name != "kl" or base.grpo.beta == config.grpo.beta:
            part.load_state_dict(trainer.all_parts[name].state_dict())
    return other


def _make(trainer: Trainer, step: int, saved: SavedRollouts) -> tuple[pyarrow.Table | None, dict[str, float]]:
    """Make the step. Return the metrics and, on rank 0, a table of the inputs of the loss of all ranks. Collective."""
    from hybrid_grpo.commands.replays.replay import LossRecorder, in_saved_order
    from hybrid_grpo.distributed.ranks import gather_objects, rank
    from hybrid_grpo.records.tokens import TokenText

    recorder = trainer.trace
    assert isinstance(recorder, LossRecorder)
    recorder.begin(step)
    trainer.step(step)
    assert trainer.last_rollout is not None and trainer.last_advantages_BT is not None
    rollout, text = trainer.last_rollout[0], TokenText(trainer.inputs.tokenizer)
    recorder.gather(trainer.assignment, rollout.num_generations)
    first_group = rank() * len(rollout.prompts)
    own = recorder.table(rollout, first_group, trainer.last_advantages_BT, trainer.plan.num_iterations, text)
    tables, values = gather_objects(own), trainer.meter.reduce()
    if tables is None:
        return None, values
    return in_saved_order(tables, saved.rows(step) if saved.has(step) else {}), values


def _write(target: Path, table: pyarrow.Table, summary: dict[str, Any]) -> None:
    from hybrid_grpo.records.tokens import write_table

    try:
        write_table(target, table)
        replace_text(target.with_suffix(".json"), json.dumps(json_safe(summary), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"replay.out {target} cannot be written: {error.strerror}: make room or give another") from None


def _say(message: str) -> None:
    from hybrid_grpo.distributed.ranks import rank

    if rank() == 0:
        print(message, flush=True)


def _told(summary: dict[str, Any], table: pyarrow.Table, target: Path) -> str:
    """Return the summary as text for the terminal."""
    lines = ["", f"  {'':28}{'replayed':>16}{'logged':>16}"]
    for name, pair in summary["numbers"].items():
        cells = (f"{value:16.9g}" if value is not None else f"{'-':>16}" for value in pair.values())
        lines.append(f"  {name:28}{''.join(cells)}")
    lines.append("")
    if summary["settings"]:
        lines += [f"  with {change}" for change in summary["settings"]]
    else:
        lines.append(f"  loss and gradient norm {'equal' if summary['same'] else 'differ from'} the logged ones")
    compared = summary["completions"]
    if compared is None:
        lines.append("  the run has not saved the tokens of this step")
    else:
        lines.append(
            f"  {compared['same']} of {compared['made']} completions equal the saved ones token by token;"
            f" log-probabilities differ by at most {compared['logp']:.3g}, advantages by {compared['advantage']:.3g}"
        )
        if "first_to_differ" in compared:
            lines.append(f"  the first that differs: {compared['first_to_differ']}")
    clipped = [value for row in table["clipped"].to_pylist() for value in row or ()]
    lines.append(
        f"  {len(clipped):,} tokens in the loss, {sum(value > 0 for value in clipped):,} clipped from above and"
        f" {sum(value < 0 for value in clipped):,} from below: {target}\n"
    )
    return "\n".join(lines)
