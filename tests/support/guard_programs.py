"""`python guard_programs.py WHAT COMMAND ...`: something of rank 1 is NaN from the second step of the command on."""

import math
import os
import sys
from typing import Any

from hybrid_grpo import __main__ as program
from hybrid_grpo import trainer

what, *arguments = sys.argv[1:]
step, micro_batch_loss = trainer.Trainer.step, trainer.micro_batch_loss
at_fault = False


def faulty_step(self: trainer.Trainer, number: int) -> None:
    """Break weights or gradients before the step."""
    global at_fault
    at_fault = number >= 2 and os.environ["RANK"] == "1"
    parameters = list(self.policy.engine.engine.module.parameters())
    if at_fault and what == "weights":
        parameters[0].ds_tensor.fill_(math.nan)
    if at_fault and what == "gradient":
        for parameter in parameters:
            parameter.register_hook(lambda gradient: gradient * math.nan)
    step(self, number)


def faulty_loss(*given: Any) -> Any:
    """Break the loss of every micro-batch."""
    loss, numbers = micro_batch_loss(*given)
    return loss * math.nan if at_fault and what == "loss" else loss, numbers


trainer.Trainer.step = faulty_step  # type: ignore[method-assign]
trainer.micro_batch_loss = faulty_loss
sys.argv[1:] = arguments
program.entry()
