"""`train`: trains a policy by GRPO. Cheap checks come before expensive ones, so that mistakes are found early."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.config.adapters import is_adapter
from hybrid_grpo.config.checks import check_train
from hybrid_grpo.config.held_out import HeldOut, held_out_sets
from hybrid_grpo.config.parsing import Parsed, parse
from hybrid_grpo.config.presets import preset_fact
from hybrid_grpo.model.doing import IMPORTING, Doing
from hybrid_grpo.records.json_lines import read_jsonl

if TYPE_CHECKING:
    import torch

    from hybrid_grpo.distributed.hardware import Hardware
    from hybrid_grpo.policy import Policy
    from hybrid_grpo.run.feature import Feature
    from hybrid_grpo.run.inputs import RunInputs
    from hybrid_grpo.run.memory.plan import Plan
    from hybrid_grpo.run.reference import Reference
    from hybrid_grpo.run.stage import RunServices
    from hybrid_grpo.trainer import Trainer


def run(arguments: list[str]) -> None:
    train(parse(TrainConfig, arguments, "train"))


def train(parsed: Parsed[TrainConfig]) -> Path:
    """Train by GRPO as the configuration says; return the folder of the run. Raises UserError."""
    config = parsed.config
    plan = check_train(config, int(os.environ.get("WORLD_SIZE", "1")))
    with Doing(IMPORTING) as doing:
        from hybrid_grpo import engine
        from hybrid_grpo.commands.memory.shortage import shortage
        from hybrid_grpo.commands.verification import verified
        from hybrid_grpo.distributed.hardware import of_device
        from hybrid_grpo.run.feature import make_features
        from hybrid_grpo.run.folder import say
        from hybrid_grpo.run.training import TrainingRun
        from hybrid_grpo.watch.frozen import write_report

        device = engine.start(config.engine.timeout_minutes)
        doing("reading the data")
        inputs = read_inputs(config)
        features = make_features(config, plan, inputs)
        doing("estimating the memory that a step needs")
        memory = planned_memory(config, plan, inputs, of_device(device))
        config = memory.config if memory else config
        warning = shortage(memory) if memory else None
        facts = _facts(config, plan, inputs, memory, device)
        for feature in features:
            facts |= feature.facts
        training = TrainingRun(parsed, facts, device, inputs.fingerprints(config))
        if training.finished:
            return training.folder
        if warning:
            say(f"WARNING: it may not fit: {warning}")
        doing("loading the model")
        trainer = make_trainer(config, plan, inputs, features, device, memory, training.services)
        say(f"weights: {verified(trainer.policy)}")
        if experts := trainer.policy.experts:
            say(f"experts: {experts}")
        doing.end()
        training.train(trainer, write_report)
        say(summary(training.folder, held_out_sets(config), memory.measurable if memory else None))
        return training.folder


def _facts(
    config: TrainConfig, plan: BatchPlan, inputs: RunInputs, memory: Plan | None, device: torch.device
) -> dict[str, str]:
    """Return what a run reads and how it works, as lines for the console and the run folder."""
    from hybrid_grpo.commands.description import describe
    from hybrid_grpo.distributed.hardware import allocator_fact
    from hybrid_grpo.model.loading import weights_fact

    estimated = str(memory) if memory else "not estimated: the model's code cannot run without data"
    attention = describe(config.policy, device, paged=config.rollout.decoder == "paged")
    facts = {"batch": str(plan), "memory": estimated, "attention": attention}
    facts |= allocator_fact(device) | weights_fact(config.policy) | inputs.facts
    if config.grpo.preset is not None:
        facts["preset"] = preset_fact(config.grpo)
    if idle := config.idle_bounds(plan.optimizer_steps):
        facts["ratio"] = f"1, with one optimizer step a rollout, so that {' and '.join(idle)} have no effect"
    return facts


def read_inputs(config: TrainConfig) -> RunInputs:
    """Read everything that a run needs before any model loads. Raises UserError if something is missing or invalid."""
    from hybrid_grpo import engine
    from hybrid_grpo.run.inputs import RunInputs

    engine.check_config(config.policy, config.engine)
    return RunInputs.read(config)


def planned_memory(config: TrainConfig, plan: BatchPlan, inputs: RunInputs, hardware: Hardware) -> Plan | None:
    """Return the memory plan of a run, with what suits it where settings are left open; see `estimate` and `chosen`."""
    from hybrid_grpo.commands.memory.search import chosen
    from hybrid_grpo.run.memory.plan import estimate

    memory = estimate(
        config, plan, inputs.longest_prompt, hardware, inputs.reward_models, held_out=inputs.held_out_rows,
        held_out_longest=inputs.held_out_longest, album=inputs.sampler.album,
    )  # fmt: skip
    return memory and chosen(memory)


def make_trainer(
    config: TrainConfig, plan: BatchPlan, inputs: RunInputs, features: Sequence[Feature], device: torch.device,
    memory: Plan | None, services: RunServices,
) -> Trainer:  # fmt: skip
    """Load the models of a run, and make the trainer from them. Collective."""
    from hybrid_grpo import engine
    from hybrid_grpo.policy import Policy
    from hybrid_grpo.trainer import Trainer

    inputs.load_models(engine.OffloadedModel)
    policy = Policy(
        config.policy, config.engine, inputs.tokenizer, total_steps=config.run.steps * plan.optimizer_steps,
        decoder=config.rollout.decoder, weights=config.rollout.weights, lora=config.lora, seed=config.run.seed,
        workspace=memory.workspace() if memory else None, album=inputs.sampler.album, turns=inputs.partners,
        journal=services.journal,
    )  # fmt: skip
    reference = make_reference(config, policy, on_device=memory is not None and memory.refers)
    for feature in features:
        feature.load(policy)
    return Trainer(config, plan, policy, reference, inputs, device, features, services)


def make_reference(config: TrainConfig, policy: Policy, *, on_device: bool = False) -> Reference | None:
    """Return the starting weights, to which the KL term keeps the policy close; None if beta is 0. Collective."""
    from hybrid_grpo.run.reference import Reference, UnadaptedReference

    if not config.grpo.has_reference:
        return None
    if policy.adapters and not is_adapter(config.policy.model):
        return UnadaptedReference(policy, policy.adapters)
    return Reference(config.policy, config.engine, policy.vocabulary, on_device=on_device)


def summary(folder: Path, held_out: Sequence[HeldOut], planned_bytes: int | None = None) -> str:
    """Summarize a finished run in a few lines from its metrics, with the peak memory next to the estimated memory."""
    rows = read_jsonl(folder / "metrics.jsonl")
    steps = [row for row in rows if "time/step_s" in row]
    seconds = sum(row["time/step_s"] for row in steps)
    peaks = [row["memory/peak_gb"] for row in rows if "memory/peak_gb" in row]
    # The peak on the GPU or, on a CPU, of this process.
    peak_gb = max(peaks, default=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)
    planned = "" if planned_bytes is None else f", {planned_bytes / 1e9:.2f} GB estimated"
    facts = {
        **{
            f"{'' if of_set.rollout.temperature else 'greedy '}accuracy on {of_set.name}": _change(rows, of_set.name)
            for of_set in held_out
        },
        "completions": f"{steps[-1]['progress/completions']:,.0f} in {seconds:.1f} s of training" if steps else "",
        "generated tokens a second": _median(steps, "throughput/generated_tokens_per_s"),
        "trained tokens a second": _median(steps, "throughput/trained_tokens_per_s"),
        "peak memory of a rank": f"{peak_gb:.2f} GB{planned}", "model": str(folder / "model"),
        **{path.name: str(path) for path in sorted(folder.glob("model_*")) if path.name != "model_best"},
        "best model": _best(folder / "model_best"),
        "checkpoints": f"rm -r {quote(f'{folder}/checkpoints')} makes room" * any(folder.glob("checkpoints/step_*")),
        "report": str(folder / "report.html") * (folder / "report.html").exists(),
        "metrics": str(folder / "metrics.jsonl"),
    }  # fmt: skip
    width = max(map(len, facts))
    return "\n".join(["", *(f"  {name:{width}}  {fact}" for name, fact in facts.items() if fact), ""])


def _change(rows: list[dict[str, float]], name: str) -> str:
    """Return the first and the last accuracy on a held-out set as text; empty if there is none."""
    accuracies = [row[metric] for row in rows if (metric := f"eval/{name}/accuracy") in row]
    return f"{accuracies[0]:.3f} -> {accuracies[-1]:.3f}" if accuracies else ""


def _best(model: Path) -> str:
    """Return the folder of the best model as text, with the model's step and metric; empty if there is none."""
    from hybrid_grpo.records.exports import exported

    facts = exported(model)
    number = ", ".join(f"{name} {value:.3f}" for name, value in facts.items() if name != "step")
    return f"{model} (step {facts['step']}, {number})" if facts else ""


def _median(rows: list[dict[str, float]], name: str) -> str:
    values = sorted(row[name] for row in rows if name in row)
    return f"{values[len(values) // 2]:,.0f} (median step)" if values else ""
