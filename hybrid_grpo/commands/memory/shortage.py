"""Says that a run does not fit, and what makes it fit."""

from collections.abc import Iterator

from hybrid_grpo.commands.memory.search import changed, changes, sufficient
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.run.memory.phases import Phase, gib
from hybrid_grpo.run.memory.plan import Plan

REFUSED_ABOVE = 1.15
"""A run that needs more than this many times the usable memory is refused; from 1 to this factor, there is a
warning."""
_MOST = 4
"""Number of changes that are proposed."""


def shortage(plan: Plan) -> str | None:
    """Return a warning if a run needs more memory than it may take; None if it fits. If it clearly does not fit, raise
    UserError. Both name the largest parts, and settings that make the run fit, or else changes that make it smaller."""
    phase = plan.lacking
    if phase is None:
        return None
    on_host = phase.name == plan.host.name
    free = plan.hardware.host_bytes if on_host else plan.usable
    largest = sorted(phase.parts, key=lambda part: -part.least)[:3]
    fitting = sufficient(plan)
    ways_out = ", ".join(list(_ways_out(plan, phase))[:_MOST]) or "a machine with more memory"
    message = (
        f"{phase.name} needs {gib(phase.least)} GiB a rank and {gib(free)} are usable on"
        f" {'the GPU' if plan.gpu and not on_host else 'the host'}:"
        f" {', '.join(f'{gib(part.bytes)} of {part.name}' for part in largest)};"
        f" {f'ways out: {ways_out}' if fitting is None else 'it fits with ' + ', '.join(fitting)}"
    )
    if phase.least > REFUSED_ABOVE * free:
        raise UserError(f"the run does not fit: {message}")
    return message


def _ways_out(plan: Plan, phase: Phase) -> Iterator[str]:
    """Yield changes that make the run smaller, those of the largest parts first."""
    on_host = phase.name == plan.host.name
    for change in changes(phase):
        # Activations are those of a dry run, and smaller in another one.
        activations = change.startswith("rollout.max_completion_tokens") and phase.name in ("loss", "backward")
        try:
            now = None if activations or change.startswith("policy.") else changed(plan, change)
        except ValueError:  # it contradicts other settings
            continue
        least = phase.least + 1 if now is None else now.host.least if on_host else max(p.least for p in now.phases)
        if now is None or least < phase.least:
            yield change
