"""A program about models that are loaded into shards and do not train as they should; see rank_programs.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rank_programs import main

from hybrid_grpo import engine as engines
from hybrid_grpo.commands.verification import verified
from hybrid_grpo.config import EngineConfig, PolicyConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed import shards
from hybrid_grpo.model.loading import load_tokenizer
from hybrid_grpo.policy import Policy

STUCK = "model.model.layers.0.mlp.up_proj.weight"


def trust(folder: Path) -> dict[str, Any]:
    """Which tensors are named after ten steps under ZeRO-3 and ZeRO-1, and which broken files are refused."""
    engines.start()
    seen: dict[str, Any] = {}
    for name, stage, dtype in (("healthy", 3, "bfloat16"), ("cut", 3, "float32"), ("stuck", 3, "bfloat16")):
        seen[name] = _steps(_policy(folder / "intact", stage, dtype), name)
    seen["stuck at stage 1"] = _steps(_policy(folder / "intact", 1, "bfloat16"), "stuck")
    for name in ("intact", "more", "untied"):
        try:
            seen[name] = verified(_policy(folder / name, 3, "float32"))
        except UserError as error:
            seen[name] = str(error)
    return seen


def _policy(folder: Path, stage: int, dtype: str) -> Policy:
    config = PolicyConfig(model=str(folder), dtype=dtype, lr=1e-4)  # type: ignore[arg-type]
    return Policy(config, EngineConfig(zero_stage=stage), load_tokenizer(config.model), total_steps=10)


def _steps(policy: Policy, fault: str) -> dict[int, str]:
    """Ten optimizer steps on a sentence; what is frozen after those after which this is looked at."""
    if fault == "cut":
        policy.engine.engine.module.model.model.layers[0].register_forward_hook(lambda *of: of[-1].detach())
    found: dict[int, str] = {}
    update = policy.engine.step
    if fault == "stuck":
        policy.engine.step = lambda lr: _undone(policy, update, lr)  # type: ignore[method-assign]
    for step in range(1, 11):
        for _ in policy.accumulate_sft_gradient([[1, 2]], [[3, 4, 5, 6]], lambda: None):
            pass
        policy.step()
        if policy.frozen is not None:
            found[step] = str(policy.frozen)
    return found


def _undone(policy: Policy, update: Any, lr: float) -> Any:
    """An optimizer step that leaves one weight as it was."""
    engine = policy.engine.engine
    layout = engine.module, engine.optimizer, policy.engine.stage
    kept = {name: weight.clone() for name, weight, _ in shards.trained_pieces(*layout) if name == STUCK}
    result = update(lr)
    with torch.no_grad():
        for name, weight, _ in shards.trained_pieces(*layout):
            if name == STUCK:
                weight.copy_(kept[name])
    return result


if __name__ == "__main__":
    main(globals())
