"""Programs of test_pretraining.py; see rank_programs.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rank_programs import made, main
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid_grpo.engine import StepResult
from hybrid_grpo.features.pretraining.pretraining import PretrainingLoss
from hybrid_grpo.grpo.minibatches import Signals
from hybrid_grpo.run.feature import Features

COEF = 0.3
TEXTS = ["dcab", "zyxwvutsrqponm", "abc:abc", "hello", "q", "mnbvcxylkjhgf"]


def gradients(folder: Path) -> dict[str, Any]:
    """The gradient of each of two optimizer steps with the pretraining loss, without it, and of that loss alone by
    transformers and autograd."""
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    trainer = made(
        folder,
        policy={"lr": 1e-6, "micro_batch_tokens": 40},
        engine={"zero_stage": 0, "adam": "torch"},
        data={"path": [{"prompt": text, "answer": ""} for text in TEXTS]},
        ptx={"coef": COEF, "path": str(texts), "rows_per_step": 5, "max_tokens": 6},
        rollout={"prompts_per_step": 4, "num_generations": 4, "max_completion_tokens": 8},
        grpo={"num_minibatches": 2},
        rewards=["exact_match"],
    )
    policy, (pretraining,) = trainer.policy, trainer.features
    assert isinstance(pretraining, PretrainingLoss)
    rollout = trainer.sample(trainer.draw_prompts(), 1)
    shape = (len(rollout.completions), max(rollout.lengths))
    advantages_BT = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    names = {p: name.removeprefix("model.") for name, p in policy.engine.engine.module.named_parameters()}
    found: list[dict[str, Tensor]] = []

    def step() -> StepResult:
        # The weights stay: only the gradients are looked at.
        found.append({name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for p, name in names.items()})
        policy.engine.engine.module.zero_grad(set_to_none=True)
        return StepResult(0.0, True)

    policy.step = step  # type: ignore[method-assign]
    assert trainer.all_parts["ptx"] is pretraining.state
    start = trainer.all_parts["ptx"].state_dict()
    batches = [[row for row, _ in pretraining.state.next_batch()] for _ in range(2)]
    trainer.all_parts["ptx"].load_state_dict(start)
    signals = Signals(rollout.logp_BT, None, None, advantages_BT)
    trainer.improve(rollout, signals)
    loss = trainer.meter.reduce()["ptx/loss"]
    trainer.features = Features([], trainer.meter)
    trainer.improve(rollout, signals)
    both, alone = found[:2], found[2:]
    expected = [_by_transformers(trainer.config.policy.model, batch) for batch in batches]
    of_ptx = [gradient for _, gradient in expected]
    error = max(
        float((both[k][name] - (alone[k][name] + COEF * of_ptx[k][name])).abs().max())
        for k in range(2)
        for name in both[k]
    )
    weights = [sum(len(row) - 1 for row in batch) for batch in batches]
    mean = sum(loss * weight for (loss, _), weight in zip(expected, weights, strict=True)) / sum(weights)
    return {
        "error": error,
        "largest": [max(float(g.abs().max()) for g in gradient.values()) for gradient in (*of_ptx, *alone)],
        "loss": [loss, mean],
        "batches": batches,
        "position": pretraining.state.position,
        "read": pretraining.facts["ptx"],
    }


def _by_transformers(name: str, rows: list[list[int]]) -> tuple[float, dict[str, Tensor]]:
    """The mean cross-entropy of all tokens but the first of each row, and its gradient."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    losses = []
    for row in rows:
        logp_SV = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        losses.append(-logp_SV.gather(1, torch.tensor(row)[1:, None])[:, 0])
    loss = torch.cat(losses).mean()
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


if __name__ == "__main__":
    main(globals())
