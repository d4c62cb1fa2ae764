"""`plan`: what a training run would take on so many ranks, without loading weights."""

from __future__ import annotations

import os

from hybrid_grpo.config import PlanConfig
from hybrid_grpo.config.checks import check_train
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.parsing import parse


def run(arguments: list[str]) -> None:
    """Parse, read the data, and print the plan; a run that clearly does not fit is refused as `train` refuses it."""
    config = parse(PlanConfig, arguments, "plan").config
    ranks = config.plan.world_size
    refuse(ranks is not None and ranks < 1, f"plan.world_size {ranks} must be 1 or greater")
    batch = check_train(config, ranks or int(os.environ.get("WORLD_SIZE", "1")))

    # The settings are sound: now the imports that take seconds.
    from hybrid_grpo import engine
    from hybrid_grpo.distributed import rank
    from hybrid_grpo.run.hardware import of_device, of_table
    from hybrid_grpo.run.inputs import Task
    from hybrid_grpo.run.plan import foresee, lines, shortage

    device = engine.start()
    task = Task.read(config)
    hardware = of_table(config.plan.gpu) if config.plan.gpu else of_device(device, config.policy.dtype)
    plan = foresee(config, batch, task.longest_prompt, hardware, task.rewards.models)
    if plan is None:
        raise UserError(f"policy.model {config.policy.model} cannot be planned: its code cannot run without data")
    if rank() == 0:
        print("\n".join([f"batch: {batch}", *lines(plan)]), flush=True)
    warning = shortage(plan)
    if rank() == 0:
        print(f"it may not fit: {warning}" if warning else "it fits")
