"""Says that a run does not fit, and what makes it smaller."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.run.memory.plan import Phase, Plan, gib

REFUSED_ABOVE = 1.15
"""A run that needs more than this many times the free memory is refused; from 1 to this factor, there is a warning."""
_MOST = 4
"""Number of changes that are proposed."""


def shortage(plan: Plan) -> str | None:
    """Return a warning if a run needs more memory than is free; None if it fits. If it clearly does not fit, raise
    UserError. Both name the largest parts and changes, each of which makes the run smaller."""
    for on_host in (False, True):
        phase, free = _worst(plan, on_host), plan.hardware.host_bytes if on_host else plan.hardware.device_bytes
        if phase.least <= free:
            continue
        largest = sorted(phase.parts, key=lambda part: -part.least)[:3]
        ways_out = list(_ways_out(plan, on_host))[:_MOST]
        message = (
            f"{phase.name} needs {gib(phase.least)} GiB a rank and {gib(free)} are free on"
            f" {'the GPU' if plan.gpu and not on_host else 'the host'}:"
            f" {', '.join(f'{gib(part.bytes)} of {part.name}' for part in largest)};"
            f" ways out: {', '.join(ways_out) or 'a machine with more memory'}"
        )
        if phase.least > REFUSED_ABOVE * free:
            raise UserError(f"the run does not fit: {message}")
        return message
    return None


def _worst(plan: Plan, on_host: bool) -> Phase:
    return plan.host if on_host else max(plan.phases, key=lambda phase: phase.least)


def _ways_out(plan: Plan, on_host: bool) -> Iterator[str]:
    """Yield changes that make the run smaller, those of the largest parts first."""
    worst = _worst(plan, on_host)
    parts = sorted(worst.parts, key=lambda part: -part.least)
    for change in dict.fromkeys(change for part in parts for change in part.remedy.split(", ") if change):
        # Activations are those of a dry run, and smaller in another one.
        activations = change.startswith("rollout.max_completion_tokens") and worst.name in ("loss", "backward")
        try:
            changed = None if activations else _with(plan, change)
        except ValueError:  # it contradicts other settings
            continue
        if changed is None or _worst(changed, on_host).least < worst.least:
            yield change


def _with(plan: Plan, change: str) -> Plan | None:
    """Return the plan after a change; None if only another dry run could tell, which takes seconds."""
    name, _, value = change.partition(" ")
    if change == "more ranks":
        half = -(-plan.batch.prompts_per_rank // 2)
        return replace(plan, batch=replace(plan.batch, world_size=2 * plan.ranks, prompts_per_rank=half))
    section, key, *path = name.split(".")
    if section not in ("engine", "rollout"):
        return None
    settings = getattr(plan.config, section)
    setting: Any = value if value == "off" else json.loads(value)
    if path:
        inner, last = path
        sections = settings.deepspeed
        setting = {**sections, inner: {**sections.get(inner, {}), last: setting}}
    return replace(plan, config=replace(plan.config, **{section: replace(settings, **{key: setting})}))
