"""Looks for settings with which a run fits, among those that do not alter what is learned.

Starting with the phase that needs most, it makes the first change (remedies.py) of its largest part that helps, until
the run fits. Then it takes back what is not needed after all, the changes that cost most time first.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hybrid_grpo.distributed.ranks import all_gather_objects
from hybrid_grpo.run.memory.dry_run import NeedsData, largest_micro_batch
from hybrid_grpo.run.memory.plan import KEPT_BELOW

if TYPE_CHECKING:
    from hybrid_grpo.run.memory.phases import Phase
    from hybrid_grpo.run.memory.plan import Plan

_ZERO = "engine.deepspeed.zero_optimization."
_ALIKE = (
    *(f"{_ZERO}offload_param.device", "engine.offload_optimizer", "engine.zero_stage", "rollout.weights"),
    *("policy.gradient_checkpointing", "policy.micro_batch_tokens", "engine.sequence_parallel"),
    f"{_ZERO}stage3_max_live_parameters",
    *("rollout.keep_cache", "rollout.max_slots", "rollout.cache_gb", "rollout.prefill_tokens"),
    *(f"{_ZERO}zero_hpz_partition_size", f"{_ZERO}reduce_bucket_size"),
)
"""Settings that change the memory and the time of a run and nothing else, those that cost most time first."""


def sufficient(plan: Plan, among: Collection[str] = _ALIKE) -> list[str] | None:
    """Return changes that together make the run fit and do not alter what is learned; None if there are none."""
    found, made = plan, dict[str, str]()
    while (phase := found.lacking) is not None:
        for change in changes(phase):
            name, _, value = change.partition(" ")
            tried = _possible(found, {name: value}) if name in among else None
            if tried is not None and _helps(tried, found, phase):
                found, made[name] = tried, value
                break
        else:
            # Weights that adapters are beside have to be whole, and cannot be in host memory.
            return sufficient(plan, {*among} - {"rollout.weights"}) if "rollout.weights" in made else None
    for name in filter(made.__contains__, _ALIKE):
        fewer = {other: value for other, value in made.items() if other != name}
        if (tried := _possible(plan, fewer)) is not None and tried.lacking is None:
            made = fewer
    return [f"{name} {value}" for name, value in made.items()]


def chosen(plan: Plan) -> Plan:
    """Return the plan with a stage, recomputation and micro-batches that suit it where they are open. Collective."""
    plan, names = _chosen_stage(plan), ("gradient_checkpointing", "micro_batch_tokens")
    left_open = [f"policy.{name}" for name in names if getattr(plan.config.policy, name) is None]
    found = sufficient(plan, left_open)
    if found is None:  # nothing that is open suffices: this brings the run nearest
        found = [f"{name} true" for name in left_open if name.endswith("checkpointing")]
    most = max(all_gather_objects(found), key=len)
    return _chosen_stage(_possible(plan, dict(change.split(" ") for change in most)) or plan)


def _chosen_stage(plan: Plan) -> Plan:
    """Return the plan at ZeRO-2 if the stage is left open and whole weights leave enough room on every rank, also for
    what decoding keeps: training then fetches none, and rollouts gather none. Collective."""
    if plan.config.engine.zero_stage is not None or plan.config.engine.fetching or not plan.sharded:
        return plan
    whole = _possible(plan, {"engine.zero_stage": "2"}) or plan
    fits = whole.lacking is None and whole.peak.bytes <= KEPT_BELOW * plan.hardware.device_bytes
    return whole if all(all_gather_objects(fits and whole.keeps >= plan.keeps)) else plan


def changes(phase: Phase) -> list[str]:
    """Return the changes that make parts of a phase smaller, those of the largest parts first."""
    parts = sorted(phase.parts, key=lambda part: -part.least)
    return list(dict.fromkeys(change for part in parts for change in part.remedy.split(", ") if change))


def changed(plan: Plan, change: str) -> Plan | None:
    """Return the plan after a change; see `with_settings`."""
    name, _, value = change.partition(" ")
    if change == "more ranks":
        half = -(-plan.batch.prompts_per_rank // 2)
        return replace(plan, batch=replace(plan.batch, world_size=2 * plan.ranks, prompts_per_rank=half))
    return with_settings(plan, {name: value})


def _possible(plan: Plan, settings: dict[str, str]) -> Plan | None:
    try:
        return with_settings(plan, settings)
    except (ValueError, NeedsData):
        return None


def with_settings(plan: Plan, settings: dict[str, str]) -> Plan | None:
    """Return the plan with other values of settings, by their names; None if a name is not one that a plan knows.
    Raises ValueError if they contradict other settings."""
    config = plan.config
    for name, text in settings.items():
        section, *path = name.split(".")
        if section not in ("engine", "policy", "rollout"):
            return None
        value: Any = text if text in ("off", "cpu", "offload", "between_steps", "unmerged") else json.loads(text)
        config = replace(config, **{section: _set(getattr(config, section), path, value)})
    if config.rollout.weights == "unmerged" and config.engine.zero_stage is None:
        config = replace(config, engine=replace(config.engine, zero_stage=2))  # as when it is built
    if config.needs_whole and config.engine.stage(plan.ranks) == 3:
        return None
    dry, before = ((of.policy.gradient_checkpointing, of.rollout.weights) for of in (config, plan.config))
    if dry != before:
        sizes = plan.measured(config, plan.batch) if plan.measured else None
    elif (config.policy, config.engine.sequence_parallel) != (plan.config.policy, plan.config.engine.sequence_parallel):
        largest = largest_micro_batch(config, plan.batch, plan.prompt, packs=plan.sizes.packs, on_gpu=plan.gpu)
        sizes = plan.sizes.of_tokens(largest.input_ids_bS.numel(), plan.dtype)
    else:
        sizes = plan.sizes
    return None if sizes is None else replace(plan, config=config, sizes=sizes)


def _set(section: Any, path: list[str], value: Any) -> Any:
    """Return a section of settings, or a mapping in it, with one value replaced."""
    name, *below = path
    if isinstance(section, dict):
        return {**section, name: _set(section.get(name, {}), below, value) if below else value}
    return replace(section, **{name: _set(getattr(section, name), below, value) if below else value})


def _helps(tried: Plan, before: Plan, phase: Phase) -> bool:
    """Whether a phase became smaller at no other's cost; the host may fill up as far as it has memory."""
    if tried.lacking is None:
        return True
    host = tried.host.least <= max(before.host.least, tried.hardware.host_bytes)
    if phase.name == before.host.name:
        return tried.host.least < phase.least
    now = {of.name: of.least for of in tried.phases}
    return host and now[phase.name] < phase.least and max(now.values()) <= phase.least
