"""Checks whether a configuration can run here: files exist, packages are installed, and ranks share work evenly.

A command calls its check before it imports torch, so mistakes are reported before any model loads. The configuration
itself has already refused numbers out of bounds and settings that contradict each other. Every check raises a UserError
of one line, which names the settings and the way out.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hybrid_grpo.config.adapters import is_adapter
from hybrid_grpo.config.commands import SftConfig
from hybrid_grpo.config.composition import EvaluationConfig
from hybrid_grpo.config.data import DataConfig
from hybrid_grpo.config.errors import UserError, refuse, refuse_indivisible
from hybrid_grpo.config.held_out import HeldOut, check_best, held_out_sets
from hybrid_grpo.config.model import PolicyConfig
from hybrid_grpo.config.rewards import RewardConfig
from hybrid_grpo.config.sources import check_model_folder, check_source
from hybrid_grpo.config.train import ModelRunConfig, TrainConfig

_MOST_ROWS = 2**16
"""Maximum number of completions of a rollout on one rank. More would not fit in memory, and planning would be slow."""


@dataclass(frozen=True)
class BatchPlan:
    """The batch equation of a GRPO step, derived from the configuration and the number of ranks."""

    world_size: int
    prompts_per_rank: int
    num_generations: int
    num_minibatches: int
    num_iterations: int
    off_policy_rows: int = 0
    """Completions per prompt that a feature supplies instead of the policy."""

    @cached_property
    def own_generations(self) -> int:
        """Completions per prompt that the policy samples."""
        return self.num_generations - self.off_policy_rows

    @cached_property
    def rows(self) -> int:
        """Completions of one rollout, over all ranks."""
        return self.world_size * self.prompts_per_rank * self.num_generations

    @cached_property
    def optimizer_steps(self) -> int:
        """Optimizer steps on one rollout."""
        return self.num_iterations * self.num_minibatches

    def __str__(self) -> str:
        given = f" ({self.off_policy_rows} given)" if self.off_policy_rows else ""
        ranks, prompts = _counted(self.world_size, "rank"), _counted(self.prompts_per_rank, "prompt")
        passes, parts = _counted(self.num_iterations, "iteration"), _counted(self.num_minibatches, "minibatch")
        return (
            f"{ranks} x {prompts} x {self.num_generations} completions{given} = {self.rows} completions a step;"
            f" {passes} x {parts} = {_counted(self.optimizer_steps, 'update')} of"
            f" {self.rows // self.num_minibatches} completions"
        )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def batch_plan(config: TrainConfig, world_size: int) -> BatchPlan:
    """Return the batch equation. Raises UserError, with the nearest number that works, if prompts divide unevenly."""
    rollout, grpo = config.rollout, config.grpo
    shards = world_size * grpo.num_minibatches
    refuse_indivisible("rollout.prompts_per_step", rollout.prompts_per_step, shards, "ranks x grpo.num_minibatches")
    prompts = rollout.prompts_per_step // world_size
    refuse(
        prompts * rollout.num_generations > _MOST_ROWS,
        f"rollout.num_generations {rollout.num_generations} x {prompts} prompts of rollout.prompts_per_step on a rank"
        f" are more than {_MOST_ROWS} completions at a time: lower one of the two",
    )
    return BatchPlan(
        world_size=world_size, prompts_per_rank=prompts, num_generations=rollout.num_generations,
        num_minibatches=grpo.num_minibatches, num_iterations=grpo.num_iterations,
        off_policy_rows=config.off_policy_rows,
    )  # fmt: skip


def check_train(config: TrainConfig, world_size: int) -> BatchPlan:
    """Return the batch equation of a training run. Raises UserError if the run cannot work on this machine."""
    _check_training(config, world_size)
    refuse(
        config.lora.load_in_4bit and config.grpo.has_reference and is_adapter(config.policy.model),
        f"grpo.beta {config.grpo.beta:g} would keep the adapter policy.model {config.policy.model} close to itself on"
        " its base in full, and lora.load_in_4bit trains it on one in four bits: remove one of them",
    )
    check_best(config, check_held_out(config))
    return batch_plan(config, world_size)


def check_shapes(config: TrainConfig, world_size: int) -> BatchPlan:
    """Return the batch equation of a run that is planned without its data. Raises UserError if it cannot work."""
    check_policy(config.policy)
    config.engine.check(world_size)
    return batch_plan(config, world_size)


def _check_features(config: Any, world_size: int) -> None:
    for feature in config.active_features:
        feature.check_place(config, world_size)
        for setting, file in feature.files.items():
            check_source(setting, file)
        for setting, name in feature.models.items():
            if name is not None:
                check_model_folder(setting, name)


def check_held_out(config: EvaluationConfig) -> list[HeldOut]:
    """Return the held-out sets. Raises UserError if there are no rewards, or if the rows of a set do not exist."""
    if not (config.rollout.environment or config.rollout.agent):
        check_rewards(config.rewards)
    sets = held_out_sets(config)
    for held_out in sets:
        if held_out.rows is not None and (held_out.rows.path != "" or held_out.data.task is None):
            check_source(f"{held_out.setting}.path", held_out.rows.path)
    return sets


def check_sft(config: SftConfig, world_size: int) -> None:
    _check_training(config, world_size)
    refuse_indivisible("sft.batch_size", config.sft.batch_size, world_size, "ranks")


def _check_training(config: ModelRunConfig, world_size: int) -> None:
    """Raise UserError if what all training stages, or their features, need is missing, such as model or packages."""
    _check_features(config, world_size)
    check_policy(config.policy)
    rank = config.lora.rank
    refuse(
        rank > 0 and find_spec("peft") is None,
        f"lora.rank {rank} needs peft, which is not installed: pip install 'hybrid_grpo[lora]'",
    )
    refuse(
        config.lora.load_in_4bit and find_spec("bitsandbytes") is None,
        "lora.load_in_4bit needs bitsandbytes, which is not installed: pip install 'hybrid_grpo[qlora]'",
    )
    refuse(
        config.needs_whole and config.engine.stage(world_size) == 3,
        "lora.load_in_4bit and rollout.weights unmerged need whole weights on every rank: set engine.zero_stage to 2",
    )
    # wandb makes a folder of its name in the working directory, which is found too, but has no origin.
    refuse(
        config.log.wandb != "disabled" and getattr(find_spec("wandb"), "origin", None) is None,
        f"log.wandb {config.log.wandb}: the package is not installed: pip install wandb, or set disabled",
    )
    _check_run_folder(config.run.dir)
    config.engine.check(world_size)
    check_data(config.data)
    resume = config.run.resume
    refuse(
        resume not in ("auto", "never") and not Path(resume).is_dir(),
        f"run.resume {resume}: there is no such folder: give auto, never, or the folder of a checkpoint, as in"
        " runs/NAME/checkpoints/step_000100",
    )


def check_policy(policy: PolicyConfig) -> None:
    refuse(not policy.model, "policy.model is not set: give a model folder or a hub name")
    check_model_folder("policy.model", policy.model)


def _check_run_folder(folder: str) -> None:
    try:
        above = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
        refuse(not above.is_dir(), f"run.dir {folder}: {above} is a file, not a folder")
        # The run folder is made after all inputs have been read. Until then a temporary one shows that it can be.
        with TemporaryDirectory(dir=above, prefix=".hybrid_grpo_"):
            pass
    except OSError as error:
        raise UserError(f"run.dir {folder}: no folder can be made there: {error.strerror}: give another") from None


def check_data(data: DataConfig) -> None:
    """Raise UserError if a source of rows is missing or empty. A task without a path makes its own rows."""
    for source in data.mixture:
        if source.task is None or source.path != "":
            check_source(f"data.mixture {source.name}: path", source.path)
    if (not data.mixture and data.task is None) or data.path != "":
        check_source("data.path", data.path)
    if data.eval_path is not None:
        check_source("data.eval_path", data.eval_path)


def check_output(setting: str, output: str, what: str, source: Any) -> None:
    """Refuse an output file (not `-`) that cannot be written, or would replace `source`, from which `what` is read."""
    if output == "-":
        return
    path = Path(output)
    refuse(path.is_dir(), f"{setting} {path} is a folder: give a file")
    refuse(not path.parent.is_dir(), f"{setting} {path}: there is no folder {path.parent}")
    refuse(
        isinstance(source, str) and path.exists() and os.path.exists(source) and path.samefile(source),
        f"{setting} {path} would replace {what}: give another file",
    )


def check_rewards(rewards: list[RewardConfig]) -> None:
    refuse(
        not rewards,
        "rewards is empty: give at least one, as in --rewards exact_match, or a data.task, which has its own",
    )
