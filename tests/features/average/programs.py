"""Programs of the average's tests; see tests/support/rank_programs.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rank_programs import build, main
from torch import Tensor

from hybrid_grpo.config import EngineConfig, LoraConfig, PolicyConfig, SftConfig
from hybrid_grpo.data.batch import MicroBatch
from hybrid_grpo.distributed.ranks import barrier
from hybrid_grpo.features.average.average import Average, MovingAverage
from hybrid_grpo.features.average.settings import AverageConfig
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.policy import Policy
from hybrid_grpo.records.metrics.meter import Meter
from hybrid_grpo.run.stage import Stage

DECAY = 0.7


def averages(folder: Path) -> dict[str, Any]:
    """What becomes of the average at every stage, in bfloat16, and with adapters."""
    seen: dict[str, Any] = {}
    for name, stage, dtype in (
        ("stage 0", 0, "float32"),
        ("stage 2", 2, "float32"),
        ("stage 3", 3, "float32"),
        ("bfloat16", 3, "bfloat16"),
    ):
        policy = build(folder, stage=stage, dtype=dtype).policy
        seen[name], average = followed(policy, folder / name)
        average.load(folder / "stage 0")
        seen[name]["of stage 0"] = sums(policy, average)
    config = PolicyConfig(model=str(folder / "model"), dtype="float32", lr=1e-3)
    settings: dict[str, Any] = {"total_steps": 100, "lora": LoraConfig(rank=2, alpha=4), "seed": 1}
    adapted = Policy(config, EngineConfig(zero_stage=3), policy.tokenizer, **settings)
    seen["adapters"], _ = followed(adapted, folder / "adapters")
    return seen


class Steps(Stage):
    """Steps of a policy with an average of its weights."""

    def __init__(self, policy: Policy) -> None:
        self.average = Average(SftConfig(average=AverageConfig(decay=DECAY)), None, None)
        super().__init__(policy, Meter(device=policy.engine.device), [self.average])
        self.average.load(policy)


def followed(policy: Policy, folder: Path) -> tuple[dict[str, Any], MovingAverage]:
    """Four steps, of which the second is skipped, and the average after them; it is saved before the last."""
    steps = Steps(policy)
    average = steps.average.model
    folder.mkdir(exist_ok=True)
    texts = [policy.tokenizer(text)["input_ids"] for text in ("dcab=abcd", "tac=act", "god=dgo", "zxy=xyz")]
    batches = policy.micro_batches(TokenRow.of([ids[:4] for ids in texts], [ids[4:] for ids in texts]))
    defined = weights(policy)
    for number in range(4):
        if number == 3:
            average.save(folder)
        for micro in batches:
            logp_bT, _ = policy.forward(micro, 1.0)
            policy.engine.backward(-logp_bT.sum() * (float("inf") if number == 1 else 1.0))
        before = policy.skipped_steps
        steps.step_optimizer()
        assert policy.skipped_steps - before == (number == 1)
        if number != 1:
            now = weights(policy)
            defined = {name: DECAY * was + (1 - DECAY) * now[name] for name, was in defined.items()}
    before = weights(policy)
    with average.used():
        used, inside = weights(policy), said(policy, batches)
        policy.export(folder / "model")
    outside = said(policy, batches)
    after, total = weights(policy), sums(policy, average)
    barrier()
    # The last update again, from the files.
    average.load(folder)
    average.update()
    found = {
        "error": max(float((used[name] - defined[name]).abs().max()) for name in defined),
        "moved": min(float((before[name] - defined[name]).abs().max()) for name in defined),
        "restored": all(torch.equal(after[name], before[name]) for name in before),
        "resumed": sums(policy, average) == total,
        "said": [inside, outside],
    }
    return found, average


@torch.no_grad()
def said(policy: Policy, batches: list[MicroBatch]) -> list[float]:
    """Log-probabilities, by the training forward."""
    return [float(policy.forward(micro, 1.0)[0].sum()) for micro in batches]


def weights(policy: Policy) -> dict[str, Tensor]:
    """The trained weights, whole and in float64."""
    names = {p: name for name, p in policy.engine.engine.module.named_parameters() if p.requires_grad}
    whole = policy.engine.whole(list(names))
    return {names[parameter]: weight.to(torch.float64, copy=True) for parameter, weight in whole.items()}


def sums(policy: Policy, average: MovingAverage) -> list[float]:
    """The sum of every weight of the average."""
    with average.used():
        return [float(weight.sum()) for weight in weights(policy).values()]


if __name__ == "__main__":
    main(globals())
