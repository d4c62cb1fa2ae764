"""`plan`: estimates the memory and time of a training run without loading weights."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hybrid_grpo.commands.configs import PlanConfig
from hybrid_grpo.commands.train import planned_memory, read_inputs
from hybrid_grpo.config.checks import check_shapes, check_train
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import leading_argument, parse

if TYPE_CHECKING:
    from hybrid_grpo.run.memory.plan import Plan


SHAPES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text(encoding="utf-8"))
"""Values of config.json of well-known models by their names, without owners, `-Instruct` and the like."""
COMMAND = "plan [MODEL]"
_SHORT = {"--gpus": "--plan.world_size", "--gpu": "--plan.gpu"}


def run(arguments: list[str]) -> None:
    """Parse the arguments and print the plan, the verdict first; end with status 2 if the run clearly does not fit.
    Without data, the plan follows from the model's configuration and the settings alone."""
    name, options = leading_argument(arguments, f"{COMMAND} [--gpus N] [--gpu NAME] [options]", optional=True)
    options = [_SHORT.get((part := option.partition("="))[0], part[0]) + part[1] + part[2] for option in options]
    config = parse(PlanConfig, ["--policy.model", name, *options] if name else options, COMMAND).config
    ranks = config.plan.world_size or int(os.environ.get("WORLD_SIZE", "1"))
    data = config.data
    plan = (_of_recipe if data.path or data.task or data.mixture else _of_shapes)(config, ranks)
    if plan is None:
        raise UserError(f"policy.model {config.policy.model} cannot be planned: its code cannot run without data")

    from hybrid_grpo.commands.memory.shortage import shortage
    from hybrid_grpo.distributed.ranks import rank

    status, verdict = 0, "it fits"
    try:
        if warning := shortage(plan):
            verdict = f"it may not fit: {warning}"
    except UserError as error:
        status, verdict = 2, str(error)
    if rank() == 0:
        print("\n".join([verdict, f"batch: {plan.batch}", *lines(plan)]), flush=True)
    if status:
        raise SystemExit(status)


def _of_recipe(config: PlanConfig, ranks: int) -> Plan | None:
    """Return the plan of a run whose inputs can be read: data, tokenizer and rewards. Raises UserError."""
    batch = check_train(config, ranks)

    from hybrid_grpo import engine
    from hybrid_grpo.distributed.hardware import of_device, of_table
    from hybrid_grpo.run.feature import make_features

    device = engine.start()
    inputs = read_inputs(config)
    make_features(config, batch, inputs)  # refuses what does not fit them
    hardware = of_table(config.plan.gpu) if config.plan.gpu else of_device(device, config.policy.dtype)
    return planned_memory(config, batch, inputs, hardware)


def _of_shapes(config: PlanConfig, ranks: int) -> Plan | None:
    """Return the plan for prompts of data.max_prompt_tokens, from the model's configuration. Raises UserError."""
    batch = check_shapes(config, ranks)

    from hybrid_grpo import engine
    from hybrid_grpo.commands.memory.search import chosen
    from hybrid_grpo.distributed.hardware import of_device, of_table
    from hybrid_grpo.model.eight_bits import check_weights
    from hybrid_grpo.model.loading import load_config
    from hybrid_grpo.model.lora import check_lora
    from hybrid_grpo.run.memory.plan import estimate

    name = config.policy.model
    model_config = known_config(name) or load_config(name)
    check_lora(config.lora, model_config)
    check_weights(config.rollout.weights, model_config)
    hardware = of_table(config.plan.gpu) if config.plan.gpu else of_device(engine.start(), config.policy.dtype)
    plan = estimate(config, batch, config.data.max_prompt_tokens, hardware, model_config=model_config)
    return plan and chosen(plan)


def known_config(name: str) -> Any | None:
    """Return the transformers configuration of a well-known model; None if `name` is a folder or another model."""
    from transformers import AutoConfig

    short = re.sub(r"-(instruct|base|chat|it|pt)\b.*$", "", name.rpartition("/")[2].lower())
    values = next((values for known, values in SHAPES.items() if known.lower() == short), None)
    if values is None or Path(name).is_dir():
        return None
    shape = {key: value for key, value in values.items() if key not in ("billions", "model_type")}
    return AutoConfig.for_model(values["model_type"], name_or_path=name, max_position_embeddings=32_768, **shape)


def lines(plan: Plan) -> list[str]:
    """Return the plan as lines: a table of parts and phases in GiB, the host memory, and a step's tokens and time."""
    from hybrid_grpo.commands.memory.search import with_settings
    from hybrid_grpo.records.metrics.catalogue import duration
    from hybrid_grpo.run.memory.phases import gib

    names = list(dict.fromkeys(part.name for phase in plan.phases for part in phase.parts))
    width = max(len(name) for name in [*names, "GiB of a rank"])
    columns = [max(6, len(phase.name)) for phase in plan.phases]

    def row(name: str, cells: list[str]) -> str:
        return f"  {name:{width}}  " + "  ".join(f"{c:>{w}}" for c, w in zip(cells, columns, strict=True))

    table = [row("GiB of a rank", [phase.name for phase in plan.phases])]
    for name in names:
        cells = [sum(part.bytes for part in phase.parts if part.name == name) for phase in plan.phases]
        table.append(row(name, [gib(cell) if cell else "-" for cell in cells]))
    table.append(row("all", [gib(phase.bytes) for phase in plan.phases]))
    host = " + ".join(f"{gib(part.bytes)} {part.name}" for part in plan.host.parts)
    copy = plan.copy().bytes
    saving = f"saving: from a copy of {gib(copy)} GiB a rank in host memory; if there is no room for it, or"
    saving += " with checkpoint.asynchronous false, training waits while a checkpoint is written"
    seconds = step_seconds(plan)
    times = ", ".join(f"{name} {duration(spent)}" for name, spent in seconds.items() if spent)
    parked = with_settings(plan, {"engine.offload_optimizer": "between_steps"}) if plan.can_park else None
    gains = parked is not None and parked.lacking is None and parked.sequences > plan.sequences
    more = f"; {parked.sequences} with engine.offload_optimizer between_steps" if parked and gains else ""
    rows = plan.ranks * plan.rows
    sampled, trained = rows * plan.longest - rows * plan.prompt, rows * plan.longest * plan.batch.num_iterations
    return [
        f"model: {plan.sizes.parameters:,} parameters, {plan.sizes.trained:,} of them trained",
        f"memory on {plan.hardware.name}: {plan}", *table,
        f"cache: {plan.sequences} of {plan.laid_out} sequences of {plan.longest:,} tokens at once{more}",
        *([f"host memory: {host} = {gib(plan.host.bytes)} GiB a rank"] if host else []), *([saving] if copy else []),
        f"tokens: {plan.prompt:,} a prompt, {plan.longest - plan.prompt:,} a completion; at most {sampled:,} sampled"
        f" and {trained:,} trained a step",
        f"time: roughly {duration(sum(seconds.values()))} a step at full speed and full length ({times})",
    ]  # fmt: skip


def step_seconds(plan: Plan) -> dict[str, float]:
    """Return the seconds that each stage of a step takes at least, for the longest possible rollout.

    It is assumed that matrix products run at full speed, and that every decode step reads the weights and the cache.
    """
    length = plan.longest - plan.prompt
    product = 2 * plan.sizes.active / plan.hardware.flops
    cached = plan.slots * (plan.prompt + length / 2) * plan.sizes.token_bytes
    weights = plan.dtype * plan.sizes.active - (plan.dtype - 1) * plan.sizes.eight_bits * (plan.weights == "int8")
    read = (weights + cached) / plan.hardware.bandwidth
    prefill = plan.batch.prompts_per_rank * plan.prompt * product
    generation = prefill + plan.rows / plan.slots * length * max(read, plan.slots * product)
    # Backward costs two forwards, and gradient checkpointing runs the forward once more.
    passes = (4 if plan.config.policy.gradient_checkpointing else 3) * plan.batch.num_iterations
    forward = plan.rows * plan.longest * product
    others = {"reference": forward} if plan.config.grpo.has_reference else {}
    others |= {feature.name: feature.seconds(plan, forward, passes) for feature in plan.features}
    return {"generation": generation, "training": forward * passes, **others}
