"""A program about models that are loaded into shards and do not train as they should; see rank_programs.py."""

from pathlib import Path
from typing import Any

from rank_programs import main

from hybrid_grpo import engine as engines
from hybrid_grpo.commands.verification import verified
from hybrid_grpo.config import EngineConfig, PolicyConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed.gradients import listed
from hybrid_grpo.model.loading import load_tokenizer
from hybrid_grpo.policy import Policy


def trust(folder: Path) -> dict[str, Any]:
    """Which tensors are named after ten steps under ZeRO-3 and ZeRO-1, and which broken files are refused."""
    engines.start()
    seen: dict[str, Any] = {}
    for stage, dtype in ((3, "bfloat16"), (3, "float32"), (1, "bfloat16")):
        for name in ("healthy", "cut"):
            seen[f"{name} {stage} {dtype}"] = _steps(_policy(folder / "intact", stage, dtype), cut=name == "cut")
    for name in ("intact", "more", "untied"):
        try:
            seen[name] = verified(_policy(folder / name, 3, "float32"))
        except UserError as error:
            seen[name] = str(error)
    return seen


def _policy(folder: Path, stage: int, dtype: str) -> Policy:
    config = PolicyConfig(model=str(folder), dtype=dtype, lr=1e-4)  # type: ignore[arg-type]
    return Policy(config, EngineConfig(zero_stage=stage), load_tokenizer(config.model), total_steps=10)


def _steps(policy: Policy, *, cut: bool) -> str:
    """Ten optimizer steps on a sentence; what no gradient reached."""
    if cut:
        policy.engine.engine.module.model.model.layers[0].register_forward_hook(lambda *of: of[-1].detach())
    for _ in range(10):
        for _ in policy.accumulate_sft_gradient([[1, 2]], [[3, 4, 5, 6]], lambda: None):
            pass
        policy.step()
    return listed(policy.frozen)


if __name__ == "__main__":
    main(globals())
