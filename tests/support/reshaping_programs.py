"""Programs of tests/run/test_reshaping.py: runs that are saved after two steps, and go on after them on any layout.

See rank_programs.py. Every run is held close to a reference that moves, with a coefficient that is adapted.
"""

from pathlib import Path
from typing import Any

import rank_programs
from rank_programs import made, main, restore

from hybrid_grpo.trainer import Trainer

METRICS = ("policy/loss", "policy/grad_norm", "policy/entropy", "policy/kl", "policy/kl_coef", "reward/mean")
LORA = {"rank": 2, "alpha": 4}
AS_IF_LARGE = {
    "zero_optimization": {
        "offload_param": {"device": "cpu"},
        **{"sub_group_size": 20_000, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
    }
}
"""Several groups of weights, none of which stays gathered."""
ROUND_ROBIN = {"zero_optimization": {"round_robin_gradients": True}}
"""Weights in another order."""
FUSED = {"optimizer": {"params": {"fused": True}}}
"""AdamW as on a GPU."""


def build(
    folder: Path, stage: int, *, offload: bool = False, dtype: str = "float32", lora: dict[str, Any] | None = None,
    deepspeed: dict[str, Any] | None = None, **sections: Any,
) -> Trainer:  # fmt: skip
    """A run on the letters and their tiny model, with weight decay; `sections` are those of its features."""
    moving = {} if lora else {"ref_every": 1, "ref_mix": 0.5}
    return made(
        folder, run={"seed": 1}, policy={"dtype": dtype, "weight_decay": 0.1}, lora=lora or {},
        engine={"zero_stage": stage, "offload_optimizer": offload, "deepspeed": deepspeed or {}}, data={"limit": 40},
        rollout={"prompts_per_step": 6, "num_generations": 4, "max_completion_tokens": 8},
        grpo={"beta": 0.1, "kl_target": 0.01, **moving}, **sections,
    )  # fmt: skip


def save(folder: Path, tag: str, **settings: Any) -> dict[str, Any]:
    """Four steps, saved after the second; what the last two say, and say again after going back in the same engine."""
    trainer = build(folder, **settings)
    for step in (1, 2):
        trainer.step(step)
    trainer.meter.reduce()
    rank_programs.save(trainer, folder, tag)
    seen = finish(trainer)
    restore(trainer, folder, tag)
    return {**seen, "again": finish(trainer) == seen}


def resume(folder: Path, tag: str, **settings: Any) -> dict[str, Any]:
    """The last two steps after what `save` has written, on this layout."""
    trainer = build(folder, **settings)
    restore(trainer, folder, tag)
    return finish(trainer)


def finish(trainer: Trainer) -> dict[str, Any]:
    """Steps 3 and 4: their metrics, the tokens of this rank by completion, and every tenth number of the weights."""
    seen: dict[str, Any] = {"metrics": [], "tokens": {}, "weights": {}}
    for step in (3, 4):
        trainer.step(step)
        metrics = trainer.meter.reduce()
        seen["metrics"].append({name: metrics[name] for name in METRICS})
        assert trainer.last_rollout is not None
        rollout = trainer.last_rollout[0]
        for row, (prompt, one) in enumerate(zip(rollout.row_prompts, rollout.completions, strict=True)):
            seen["tokens"][f"{step} {prompt.id} {row % rollout.num_generations}"] = one.token_ids
    module = trainer.policy.engine.engine.module
    parameters = {p: name for name, p in module.named_parameters() if p.requires_grad}
    for parameter, weight in trainer.policy.engine.whole(list(parameters)).items():
        seen["weights"][parameters[parameter]] = weight.flatten()[::10].tolist()
    return seen


def one(folder: Path) -> dict[str, Any]:
    """Saved on one rank."""
    return {"one_3": save(folder, "one_3", stage=3), "one_0": save(folder, "one_0", stage=0)}


def two(folder: Path) -> dict[str, Any]:
    """Saved on two ranks, and resumed on as many at other stages, or after one rank."""
    return {
        "two_3": save(folder, "two_3", stage=3), "two_bf16": save(folder, "two_bf16", stage=3, dtype="bfloat16"),
        "two_lora": save(folder, "two_lora", stage=3, lora=LORA), "the same": resume(folder, "two_3", stage=3),
        "offloaded": resume(folder, "two_3", stage=3, offload=True, deepspeed=AS_IF_LARGE),
        "stage 3 to 2": resume(folder, "two_3", stage=2, deepspeed=ROUND_ROBIN),
        "stage 3 to 1, offloaded": resume(folder, "two_3", stage=1, offload=True),
        "one to two": resume(folder, "one_3", stage=3), "stage 0 to 2": resume(folder, "one_0", stage=2),
    }  # fmt: skip


def one_again(folder: Path) -> dict[str, Any]:
    """Resumed on one rank."""
    return {
        "two to one": resume(folder, "two_3", stage=3),
        "stage 3 to 0": resume(folder, "two_3", stage=0),
        **{f"fused, stage 3 to {n}": resume(folder, "two_3", stage=n, deepspeed=FUSED) for n in (0, 2, 3)},
        "adapters": resume(folder, "two_lora", stage=2, lora=LORA),
        "bfloat16": resume(folder, "two_bf16", stage=1, dtype="bfloat16"),
    }


def fused(folder: Path) -> dict[str, Any]:
    """On a GPU: saved by torch's fused AdamW, and resumed."""
    seen = {"saved": save(folder, "fused", stage=3)}
    trainer = build(folder, stage=3)
    restore(trainer, folder, "fused")
    inner = trainer.policy.engine.engine.optimizer.optimizer
    devices = {state["step"].device.type for state in inner.state.values()}
    return {**seen, "fused": inner.defaults["fused"], "steps on": sorted(devices), "resumed": finish(trainer)}


def three(folder: Path) -> dict[str, Any]:
    """Resumed on three ranks, among which many weights do not divide evenly."""
    return {"two to three": resume(folder, "two_3", stage=3), "stage 3 to 1": resume(folder, "two_3", stage=1)}


if __name__ == "__main__":
    main(globals())
