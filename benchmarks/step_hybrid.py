"""Our side of step.py: the Trainer as `train` builds it, one step a command.

    python benchmarks/step_hybrid.py [--plain] SPEC

With `--plain` log-probabilities are computed from the logits of all completion tokens at once, by torch's own
functions, as a step would without logprobs.py.
"""

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from step_worker import Measurement, Positions, Stopwatch, answer, commands, flat, shortened
from torch import Tensor

from hybrid_grpo import engine, generation
from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.checks import check_train
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.distributed.hardware import of_device
from hybrid_grpo.model import logprobs
from hybrid_grpo.policy import Policy
from hybrid_grpo.run.inputs import RunInputs
from hybrid_grpo.run.memory.plan import estimate
from hybrid_grpo.run.reference import Reference
from hybrid_grpo.run.training import loaded_objects_kept
from hybrid_grpo.trainer import Trainer


def build(arguments: list[str]) -> Trainer:
    """As in commands/train.py, but without a run folder."""
    config = parse(TrainConfig, arguments, "train").config
    plan = check_train(config, 1)
    device = engine.start()
    task = RunInputs.read(config)
    workspace = None
    if device.type != "cpu":
        memory = estimate(config, plan, task.longest_prompt, of_device(device))
        workspace = memory.workspace() if memory else None
    policy = Policy(
        config.policy, config.engine, task.tokenizer,
        total_steps=config.run.steps * plan.num_iterations * plan.num_minibatches, decoder=config.rollout.decoder,
        workspace=workspace,
    )  # fmt: skip
    # The workloads have no adapters and, if beta is 0, no reference.
    reference = Reference(config.policy, config.engine) if config.grpo.beta else None
    return Trainer(config, plan, policy, reference, task, device)


def forced(lengths: list[list[int]] | None) -> AbstractContextManager[Any]:
    """Within the context, requests have the given lengths, in the order of the data."""
    plain = generation.generate

    def generate(model: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
        assert lengths is not None
        limited = [replace(request, limits=group) for request, group in zip(requests, lengths, strict=True)]
        return plain(model, limited, *args, **kwargs)

    return nullcontext() if lengths is None else mock.patch.object(generation, "generate", generate)


def plain_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, *, temperature: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Like `logprobs.token_logprobs`, but from whole logits."""
    logits_NV = torch.nn.functional.linear(hidden_ND, weight_VD, bias_V).float()
    if temperature != 1:
        logits_NV = logits_NV / temperature
    logp_NV = logits_NV.log_softmax(-1)
    del logits_NV
    with torch.no_grad():
        entropy_N = -logp_NV.exp().mul_(logp_NV).sum(-1)
    return logp_NV.gather(1, target_N[:, None])[:, 0], entropy_N


class Side:
    """Steps of one trainer, measured."""

    def __init__(self, trainer: Trainer, spec: dict[str, Any]) -> None:
        self.trainer = trainer
        self.lengths = spec["lengths"]
        self.steps = 0
        self.watch = Stopwatch()
        self.watch.watch(trainer.policy.engine, "backward", "backward")
        self.watch.watch(trainer.policy.engine, "step", "optimizer")
        self.positions = Positions(trainer.policy.engine.engine.module)

    def step(self, shorten: int) -> dict[str, Any]:
        """One step, with forced completions shorter by a factor."""
        trainer = self.trainer
        lengths = self.lengths and shortened(self.lengths, shorten)
        self.watch.seconds.clear()
        self.positions.count = 0
        measurement = Measurement()
        self.steps += 1
        with forced(lengths):
            trainer.step(self.steps)
        values = trainer.meter.reduce()
        assert trainer.last_rollout is not None
        rollout = trainer.last_rollout[0]
        produced = [len(completion.token_ids) for completion in rollout.completions]
        updates = dict(self.watch.seconds)
        stages = {
            "generate": values["time/generate_s"] + values["time/switch_s"], "reward": values["time/reward_wait_s"],
            "reference": values.get("time/reference_s", 0.0) + values.get("time/old_logp_s", 0.0),
            "forward": values["time/train_s"] - sum(updates.values()), **updates,
        }  # fmt: skip
        result = measurement.end(
            stages, generated=sum(produced),
            trained=sum(produced) + sum(len(prompt.token_ids) for prompt in rollout.row_prompts),
            positions=self.positions.count, reward=values["reward/mean"],
        )  # fmt: skip
        assert lengths is None or produced == flat(lengths), "completions do not have the lengths forced"
        gaps = {f"logp_gap_{what}": values[f"parity/logp_abs_diff_{what}"] for what in ("mean", "max")}
        # trainer.step() reads and resets the peak itself.
        peak = {"peak_gpu_gb": values["memory/peak_gb"]} if "memory/peak_gb" in values else {}
        return {**result, **gaps, **peak, "switch_s": values["time/switch_s"]}


def main() -> None:
    spec = json.loads(Path(sys.argv[-1]).read_text())
    torch.set_num_threads(spec["threads"])
    if "--plain" in sys.argv:
        logprobs.token_logprobs = plain_logprobs
    trainer = build(spec["arguments"])
    side = Side(trainer, spec)
    answer("ready")
    with loaded_objects_kept():
        for command in commands():
            if "save" in command:
                trainer.policy.export(Path(command["save"]))
                answer("saved")
            else:
                answer(side.step(command["shorten"]))
    sys.stdout.flush()
    # As the command line does, since DeepSpeed leaves threads.
    os._exit(0)


if __name__ == "__main__":
    main()
