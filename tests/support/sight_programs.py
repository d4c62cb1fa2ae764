"""Programs with a trained tower that tests start under the launcher: see rank_programs.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from rank_programs import made, main
from safetensors.torch import load_file

from hybrid_grpo.distributed.ranks import world_size
from hybrid_grpo.run.saving.checkpoints import Checkpoints
from hybrid_grpo.trainer import Trainer

CASES = {1: ((0, 0), (3, 4)), 2: ((3, 0), (2, 0), (3, 4))}
"""ZeRO stages and ranks of adapters, by number of ranks."""
MEASURED = ("policy/loss", "policy/grad_norm", "policy/kl", "reward/mean", "parity/logp_abs_diff_mean")


def build(folder: Path, stage: int, lora: int) -> Trainer:
    """A trainer of a model that sees, with the rows of `folder`. Its reference follows it if there are no adapters."""
    moving = {} if lora else {"ref_every": 1, "ref_mix": 0.5}
    return made(
        folder,
        features=False,
        policy={"lr": 1e-2, "vision": "trained"},
        lora={"rank": lora},
        engine={"zero_stage": stage},
        data={"path": str(folder / "rows.jsonl"), "shuffle": False},
        rollout={"prompts_per_step": 4, "num_generations": 4, "max_completion_tokens": 6},
        grpo={"beta": 0.1, "num_minibatches": 2, **moving},
        rewards=[f"{folder / 'kinds.py'}:kinds"],
    )


def trained(folder: Path) -> list[dict[str, Any]]:
    """For every case, three steps, the third again from a checkpoint, and an export."""
    return [_case(folder, *case) for case in CASES[int(os.environ.get("WORLD_SIZE", "1"))]]


def _case(folder: Path, stage: int, lora: int) -> dict[str, Any]:
    trainer = build(folder, stage, lora)
    checkpoints = Checkpoints(folder / f"checkpoints.{world_size()}.{stage}.{lora}", keep=1)
    shards = [trainer.shards] if trainer.shards is not None else []
    steps = []
    for step in (1, 2, 3):
        trainer.step(step)
        steps.append(_measured(trainer))
        if step == 2:
            state = {"loader": trainer.loader.state_dict(), "policy": trainer.policy.state_dict()}
            checkpoints.save(trainer.policy.engine, step, state, shards)
    policy = trainer.policy
    assert policy.tower is not None
    whole = policy.engine.whole(list(policy.tower.weights.parameters()))
    own = dict(policy.tower.tower.named_parameters())
    follows = all(torch.equal(whole[p], own[n.replace("/", ".")]) for n, p in policy.tower.weights.named_parameters())
    out = folder / f"exported.{world_size()}.{stage}.{lora}"
    policy.export(out)
    before, after = load_file(folder / "model/model.safetensors"), load_file(out / "model.safetensors")
    again = build(folder, stage, lora)
    newest, _ = checkpoints.newest_whole()
    assert newest is not None
    state = checkpoints.load(again.policy.engine, newest)
    if again.shards is not None:
        again.shards.load(newest.folder)
    again.loader.load_state_dict(state["loader"])
    again.policy.load_state_dict(state["policy"])
    again.step(3)
    return {
        "steps": steps,
        "resumed": _measured(again),
        "follows": follows,
        "exported": all(torch.equal(after[name], of) for name, of in policy.tower.state().items()),
        "moved": sum(bool((after[name] != before[name]).any()) for name in policy.tower.state()),
        "of": len(policy.tower.state()),
    }


def _measured(trainer: Trainer) -> dict[str, float]:
    numbers = trainer.meter.reduce()
    return {name: numbers[name] for name in MEASURED}


if __name__ == "__main__":
    main(globals())
