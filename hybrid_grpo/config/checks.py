"""What a configuration must not be: refused in one line that names the settings and the way out.

Before torch is imported: a mistake costs the user a moment, not a model load.
"""

from __future__ import annotations

import dataclasses
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybrid_grpo.config import (
    BatchPlan,
    CurriculumConfig,
    DataConfig,
    GenerateConfig,
    LoraConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)
from hybrid_grpo.config.errors import did_you_mean, refuse
from hybrid_grpo.config.field_checks import check_fields, check_name, check_output, check_source, looks_like_path
from hybrid_grpo.config.grpo_checks import check_grpo
from hybrid_grpo.config.reward_checks import check_rewards
from hybrid_grpo.data.tasks import load_task


def _nearest_multiple(value: int, step: int) -> int:
    return max(step, round(value / step) * step)


def _refuse_indivisible(name: str, value: int, divisor: int, why: str) -> None:
    refuse(
        value % divisor != 0,
        f"{name} {value} does not divide by {why} = {divisor}: the nearest value is"
        f" {_nearest_multiple(value, divisor)}",
    )


def batch_plan(config: TrainConfig, world_size: int) -> BatchPlan:
    """The batch equation; refuses one that does not come out even, with the nearest value that does."""
    rollout, grpo = config.rollout, config.grpo
    shards = world_size * grpo.num_minibatches
    _refuse_indivisible("rollout.prompts_per_step", rollout.prompts_per_step, shards, "ranks x grpo.num_minibatches")
    return BatchPlan(
        world_size=world_size,
        prompts_per_rank=rollout.prompts_per_step // world_size,
        num_generations=rollout.num_generations,
        num_minibatches=grpo.num_minibatches,
        num_iterations=grpo.num_iterations,
    )


def _check_common(config: TrainConfig | SftConfig) -> None:
    for section in dataclasses.fields(config):
        if section.name != "rewards":
            check_fields(section.name, getattr(config, section.name))
    _check_model(config.policy.model)
    _check_deepspeed(config.engine.deepspeed)
    for name, limit in (("data.limit", config.data.limit), ("data.eval_limit", config.data.eval_limit)):
        refuse(limit is not None and limit < 1, f"{name} {limit} must be 1 or greater")
    for beta in config.policy.betas:
        refuse(not 0 <= beta < 1, f"policy.betas {list(config.policy.betas)} must be in [0, 1)")
    refuse(
        config.engine.offload_optimizer and config.engine.zero_stage == 0,
        "engine.offload_optimizer needs engine.zero_stage 1 or higher: set engine.zero_stage to 1, 2 or 3",
    )
    refuse(
        config.policy.dtype == "bfloat16" and config.engine.zero_stage == 0,
        "policy.dtype bfloat16 needs engine.zero_stage 1 or higher (at stage 0 DeepSpeed keeps no float32 weights):"
        " set engine.zero_stage to 1, or policy.dtype to float32",
    )
    refuse(
        config.policy.shared_prefix == "on" and config.policy.attn_implementation not in ("auto", "packed"),
        f"policy.shared_prefix on needs rows that are packed, which policy.attn_implementation"
        f" {config.policy.attn_implementation} pads: set that to auto",
    )
    check_name("run.name", config.run.name, "it names a folder")
    _check_run_dir(config.run.dir)


def _check_run_dir(folder: str) -> None:
    refuse(folder.startswith("~"), f"run.dir {folder}: ~ is only known to shells: write the whole path")
    above = next((path for path in (Path(folder), *Path(folder).parents) if path.exists()), None)
    refuse(above is not None and not above.is_dir(), f"run.dir {folder}: {above} is a file, not a folder")


def _check_model(model: str) -> None:
    refuse(not model, "policy.model is not set: give a model folder or a hub name")
    if looks_like_path(model):
        refuse(Path(model).is_file(), f"policy.model {model} is a file: give the folder of a model or a hub name")
        refuse(not Path(model).is_dir(), f"policy.model {model}: there is no such folder")
        refuse(
            not (Path(model) / "config.json").is_file(),
            f"policy.model {model} is not a model folder: it has no config.json",
        )


def _check_lora(lora: LoraConfig) -> None:
    for name, value in vars(lora).items():
        refuse(
            not lora.rank and value != getattr(LoraConfig(), name),
            f"lora.{name} is set, but without lora.rank there are no adapters: set lora.rank, or take it out",
        )
    targets = lora.target_modules
    refuse(
        targets != "all-linear" and (not targets or "" in targets),
        f"lora.target_modules {targets}: name layers, as in [q_proj, v_proj], or all-linear",
    )
    refuse(
        bool(lora.rank) and find_spec("peft") is None,
        f"lora.rank {lora.rank} needs peft, which is not installed: pip install 'hybrid_grpo[lora]'",
    )


def _check_sources(data: DataConfig) -> None:
    _check_training_source(data)
    if data.eval_path is not None:
        check_source("data.eval_path", data.eval_path)


def _check_training_source(data: DataConfig) -> None:
    refuse(
        data.task is not None and data.prompt_column != "prompt",
        f"data.prompt_column {data.prompt_column}: prompts are what data.task {data.task} makes of a row: take out one"
        " of them",
    )
    if data.path or data.task is None or load_task(data.task).made is None:
        check_source("data.path", data.path)


_OWNED = {
    "zero_optimization.stage": "set by engine.zero_stage",
    "bf16.enabled": "set by policy.dtype",
    "fp16.enabled": "set by policy.dtype",
    "gradient_clipping": "set by policy.max_grad_norm",
    "gradient_accumulation_steps": "derived from policy.micro_batch_tokens",
    "train_batch_size": "derived from the batch settings",
    "train_micro_batch_size_per_gpu": "derived from policy.micro_batch_tokens",
    "managed_gradient_accumulation": "derived from policy.micro_batch_tokens",
    "hybrid_engine.enabled": "always on, since generation depends on it",
    "optimizer.params.lr": "set by policy.lr",
    "optimizer.params.betas": "set by policy.betas",
    "optimizer.params.weight_decay": "set by policy.weight_decay",
    "scheduler": "set by policy.lr_schedule",
}
"""DeepSpeed settings that follow from ours."""


def _check_deepspeed(overrides: dict[str, Any]) -> None:
    for owned, origin in _OWNED.items():
        section, path = overrides, "engine.deepspeed"
        *above, last = owned.split(".")
        for key in above:
            section, path = section.get(key, {}), f"{path}.{key}"
            refuse(not isinstance(section, dict), f"{path} {section!r} must be a section of DeepSpeed's settings")
        refuse(last in section, f"engine.deepspeed.{owned} is {origin}: take it out of engine.deepspeed")


def check_sft(config: SftConfig, world_size: int) -> None:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        UserError: one line that names the settings and the way out.
    """
    _check_common(config)
    _check_sources(config.data)
    _check_lora(config.lora)
    _refuse_indivisible("sft.batch_size", config.sft.batch_size, world_size, "ranks")
    for name in ("eval_path", "eval_split", "eval_limit"):
        refuse(
            getattr(config.data, name) is not None,
            f"data.{name} is set, but sft does not evaluate: take it out, and use `hybrid-grpo eval` on the result",
        )


def check_train(config: TrainConfig, world_size: int) -> BatchPlan:
    """Refuse what cannot work, before anything is loaded; return the batch equation.

    Raises:
        UserError: one line that names the settings and the way out.
    """
    _check_common(config)
    _check_sources(config.data)
    rollout = config.rollout
    refuse(
        rollout.num_generations < 2,
        f"rollout.num_generations {rollout.num_generations} makes no group: advantages need 2 or more",
    )
    refuse(
        rollout.temperature == 0,
        "rollout.temperature 0 samples the same completion for a whole group: give a value above 0",
    )
    _check_rollout(rollout)
    _check_lora(config.lora)
    refuse(
        bool(config.lora.rank) and bool(config.grpo.ref_every),
        f"grpo.ref_every {config.grpo.ref_every} refreshes the reference, which with lora.rank is the model without"
        " adapters: take out one of them",
    )
    names = check_rewards(config.rewards)
    outcome = config.eval.outcome
    refuse(
        outcome is not None and outcome not in names,
        f"eval.outcome {outcome!r} is not a reward of this run: {did_you_mean(outcome or '', names)}",
    )
    check_name("eval.name", config.eval.name, "it names a metric")
    check_grpo(config)
    _check_curriculum(config.curriculum, config.data)
    if config.data.eval_path is None and config.data.eval_split is None:
        for setting, value in (("eval.every", config.eval.every), ("data.eval_limit", config.data.eval_limit)):
            refuse(bool(value), f"{setting} {value} needs held-out prompts: set data.eval_path or data.eval_split")
    return batch_plan(config, world_size)


def check_generate(config: GenerateConfig, world_size: int) -> None:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        UserError: one line that names the settings and the way out.
    """
    _check_common(config)
    rollout, output = config.rollout, config.generate.output
    refuse(
        rollout.temperature == 0 and rollout.num_generations > 1,
        f"rollout.temperature 0 has one completion for a prompt, and rollout.num_generations is"
        f" {rollout.num_generations}: set it to 1, or the temperature above 0",
    )
    _check_rollout(rollout)
    if config.reads_stdin:
        refuse(
            config.data.task is not None,
            f"data.path - is prompts from standard input, and data.task {config.data.task} reads rows: take out one of"
            " them",
        )
        refuse(world_size > 1, f"data.path is standard input, which {world_size} ranks cannot share: give a source")
    else:
        _check_training_source(config.data)
    refuse(output == "-" and world_size > 1, f"generate.output -: {world_size} ranks write a file each: give its name")
    check_output("generate.output", output, "the prompts of data.path", config.data.path)


def _check_curriculum(curriculum: CurriculumConfig, data: DataConfig) -> None:
    low, high = curriculum.skip_below, curriculum.skip_above
    skips = low is not None or high is not None
    for setting, value in (("skip_below", low), ("skip_above", high)):
        outside = value is not None and not 0 <= value <= 1
        refuse(outside, f"curriculum.{setting} {value} must be in [0, 1]: it is a success rate")
    refuse(
        low is not None and high is not None and low >= high,
        f"curriculum.skip_below {low} and curriculum.skip_above {high} leave out everything: set the first lower",
    )
    refuse(
        not 0 < curriculum.floor <= 1,
        f"curriculum.floor {curriculum.floor} must be in (0, 1]: at 0 a prompt that was left out never came back",
    )
    follows = curriculum.sampling == "difficulty"
    for setting, used, way_out in (
        ("min_tries", skips, "without curriculum.skip_above or curriculum.skip_below"),
        ("column", follows, "with curriculum.sampling uniform: set that to difficulty"),
        ("floor", follows or skips, "with curriculum.sampling uniform: set that to difficulty"),
    ):
        value = getattr(curriculum, setting)
        refuse(
            not used and value != getattr(CurriculumConfig(), setting),
            f"curriculum.{setting} {value} has no effect {way_out}, or take it out",
        )
    refuse(
        (follows or skips) and not data.shuffle,
        "data.shuffle false keeps the order of the source, which curriculum changes: set it to true, or take out"
        " the settings of curriculum",
    )


def _check_rollout(rollout: RolloutConfig) -> None:
    refuse(
        rollout.min_completion_tokens > rollout.max_completion_tokens,
        f"rollout.min_completion_tokens {rollout.min_completion_tokens} is more than rollout.max_completion_tokens"
        f" {rollout.max_completion_tokens}: set it to that or lower",
    )
    refuse(not 0 < rollout.top_p <= 1, f"rollout.top_p {rollout.top_p} must be in (0, 1]")
    refuse(not 0 <= rollout.min_p <= 1, f"rollout.min_p {rollout.min_p} must be in [0, 1]")
    for token, bias in rollout.logit_bias.items():
        refuse(
            not re.fullmatch(r"0|[1-9][0-9]*", token),
            f"rollout.logit_bias {token!r} is no token id: give a whole number, 0 or greater",
        )
        refuse(not math.isfinite(bias), f"rollout.logit_bias {token}: expected a finite number, got {bias}")
    for id in rollout.stop_ids:
        refuse(id < 0, f"rollout.stop_ids {rollout.stop_ids}: a token id is 0 or greater")
    refuse("" in rollout.stop_strings, f"rollout.stop_strings {rollout.stop_strings}: empty text would end everything")
    for name in ("stop_ids", "stop_strings"):
        refuse(
            rollout.ignore_eos and bool(getattr(rollout, name)),
            f"rollout.{name} ends completions and rollout.ignore_eos lets nothing but the limit end them: set one",
        )
    refuse(
        rollout.cache_gb is not None and rollout.cache_gb <= 0,
        f"rollout.cache_gb {rollout.cache_gb} must be greater than 0",
    )
    refuse(
        rollout.cache_gb is not None and rollout.decoder == "transformers",
        f"rollout.cache_gb {rollout.cache_gb} has no effect on rollout.decoder transformers, whose caches have no"
        " bound: take it out",
    )
