"""Programs that tests run on one rank or more, one function each: `python rank_programs.py NAME FOLDER`.

Every rank writes what it saw to FOLDER/NAME.WORLD.RANK.json; the tests compare the files.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
from reward_helpers import in_time

from hybrid_grpo import engine as engines
from hybrid_grpo.commands.train import make_trainer
from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config import build as build_config
from hybrid_grpo.config.checks import check_train
from hybrid_grpo.config.errors import RunStopped
from hybrid_grpo.distributed.ranks import barrier, rank, world_size
from hybrid_grpo.generation import Workspace
from hybrid_grpo.run.feature import make_features
from hybrid_grpo.run.inputs import RunInputs
from hybrid_grpo.run.stage import RunServices
from hybrid_grpo.trainer import Trainer

UNPACKED, EXPERTS = "mamba", "qwen3_moe"
"""Folders, where a test made them."""
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_single", "broadcast", "barrier", "reduce", "gather", "scatter",
    "all_to_all", "all_to_all_single", "send", "recv", "all_gather_object", "broadcast_object_list",
    "gather_object", "_all_gather_base", "_reduce_scatter_base", "all_gather_coalesced", "all_reduce_coalesced",
)  # fmt: skip


def count_collectives() -> Counter[str]:
    """Count every call of a collective from now on, DeepSpeed's included: all end in torch.distributed."""
    calls: Counter[str] = Counter()
    for name in COLLECTIVES:
        for module in (dist, dist.distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, counted(calls, name, getattr(module, name)))
    return calls


def counted(calls: Counter[str], name: str, function: Any) -> Any:
    """`function`, its calls counted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return call


SAMPLED = {"limit": 7, "num_generations": 4, "temperature": 1.0, "outcome": "letters_in_place", "threshold": 0.25}


def made(folder: Path, *, features: bool = True, workspace: Workspace | None = None, **sections: Any) -> Trainer:
    """A trainer as `train` makes it, of the settings in these sections, on the letters and their tiny model."""
    usual: dict[str, Any] = {
        "policy": {"model": str(folder / "model"), "dtype": "float32", "lr": 1e-3},
        "data": {"path": str(folder / "train.jsonl")},
        "rewards": ["exact_match", "letters_in_place"],
        "log": {"wandb": "disabled"},
    }
    given = {name: {**usual.get(name, {}), **s} if isinstance(s, dict) else s for name, s in sections.items()}
    config = build_config(TrainConfig, {**usual, **given})
    device = engines.start()
    plan, inputs = check_train(config, world_size()), RunInputs.read(config)
    memory: Any = SimpleNamespace(workspace=lambda: workspace, refers=config.grpo.ref_every == 0)
    chosen = make_features(config, plan, inputs) if features else []
    return make_trainer(config, plan, inputs, chosen, device, memory, RunServices())


def build(
    folder: Path, *, stage: int = 3, beta: float = 0.0, num_minibatches: int = 1, num_iterations: int = 1,
    offload: bool | str = False, prompts_per_step: int = 8, model: str = "model", split: int = 1,
    deepspeed: dict[str, Any] | None = None, workspace: Workspace | None = None, rollout: dict[str, Any] | None = None,
    **policy: Any,
) -> Trainer:  # fmt: skip
    """A trainer on the letters and their tiny model, or another in the same folder; `deepspeed` is of the
    configuration's section `engine`, `rollout` and `policy` are of these sections."""
    parallel = {"sequence_parallel": split}
    sizes = {"prompts_per_step": prompts_per_step, "num_generations": 4, "max_completion_tokens": 12, "max_slots": 16}
    return made(
        folder, features=False, workspace=workspace,
        policy={"model": str(folder / model), "micro_batch_tokens": 160, **policy},
        engine={"zero_stage": stage, "offload_optimizer": offload, **parallel, "deepspeed": deepspeed or {}},
        data={"limit": 200, "eval_path": str(folder / "heldout.jsonl"), "eval_limit": 24},
        rollout={**sizes, **(rollout or {})},
        grpo={"beta": beta, "num_minibatches": num_minibatches, "num_iterations": num_iterations},
        eval={"sets": {"sampled": SAMPLED}},
    )  # fmt: skip


def steps(folder: Path, stage: int, beta: float, num_minibatches: int = 1) -> dict[str, Any]:
    """Two steps: rollouts, and the reduced numbers."""
    return two_steps(build(folder, stage=stage, beta=beta, num_minibatches=num_minibatches))


def two_steps(trainer: Trainer, between: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """What `steps` says of a trainer; something may be done `between` them."""
    seen: dict[str, Any] = {"rollouts": [], "metrics": []}
    for step in (1, 2):
        trainer.step(step)
        assert trainer.last_rollout is not None
        rollout, _scores, advantages_B = trainer.last_rollout
        rows = zip(rollout.row_prompts, rollout.completions, advantages_B.tolist(), strict=True)
        seen["rollouts"].append([(p.id, c.token_ids, c.logp, a) for p, c, a in rows])
        seen["metrics"].append(trainer.meter.reduce())
        if step == 1:
            between()
    trainer.evaluate(0, trainer.eval_sets)
    held_out = trainer.eval_sets[0]
    greedy = trainer.policy.complete(
        held_out.requests(held_out.own_prompts()), held_out.sampling, trainer.config.rollout
    )
    seen["greedy"] = [group[0].token_ids for group in greedy]
    seen["eval"] = trainer.meter.reduce()
    return seen


def traced(folder: Path) -> list[str]:
    """The files of the package that the second step with the default settings enters."""
    trainer = made(folder, rollout={"prompts_per_step": 8, "num_generations": 4, "max_completion_tokens": 8})
    trainer.step(1)
    entered = set()
    sys.setprofile(lambda frame, event, _: entered.add(frame.f_code.co_filename) if event == "call" else None)
    trainer.step(2)
    sys.setprofile(None)
    package = f"{Path(engines.__file__).parent}/"
    return sorted(name.removeprefix(package) for name in entered if name.startswith(package))


def masked(folder: Path) -> dict[str, Any]:
    """A step with each filter, and with a reference that is the policy."""
    seen: dict[str, Any] = {}
    for name, value in (("top_p", 0.9), ("top_k", 5), ("min_p", 0.1)):
        settings = {name: value, "logprobs": "mask", "min_completion_tokens": 2}
        trainer = build(folder, beta=0.1, rollout=settings)
        trainer.step(1)
        assert trainer.last_rollout is not None
        completions = trainer.last_rollout[0].completions
        sizes = [size for c in completions for mask in c.sidecars for size in mask.arrays()[1].tolist()]
        seen[name] = {"metrics": trainer.meter.reduce(), "sizes": sizes, "tokens": [c.token_ids for c in completions]}
    return seen


zero0, zero2, zero3 = (partial(steps, stage=stage, beta=0.0) for stage in (0, 2, 3))
zero3_reference = partial(steps, stage=3, beta=0.1, num_minibatches=2)
split = lambda folder: two_steps(build(folder, beta=0.1, num_minibatches=2, split=world_size()))  # noqa: E731


def experts(folder: Path) -> dict[str, Any]:
    """Steps of a mixture of experts that replay its routing, in forward and in recomputed layers."""
    return two_steps(build(folder, model=EXPERTS, routing="replay", gradient_checkpointing=True))


def variants(folder: Path) -> dict[str, Any]:
    """One step each of settings that must not change what is computed, or only by rounding."""
    seen = {}
    for name, settings in {
        "checkpointing": {"gradient_checkpointing": True},
        "bf16 stage 1": {"dtype": "bfloat16", "stage": 1},
        "bf16 stage 2": {"dtype": "bfloat16", "stage": 2},
        "bf16 stage 3, offloaded": {"dtype": "bfloat16", "offload": True, "gradient_checkpointing": True},
    }.items():
        trainer = build(folder, **settings)  # type: ignore[arg-type]
        trainer.step(1)
        seen[name] = trainer.meter.reduce()
    return seen


def attentions(folder: Path) -> dict[str, Any]:
    """One step with every way of the training forward, and what its micro-batches computed."""
    seen = {}
    ways: dict[str, Any] = {name: {"attn_implementation": name} for name in ("sdpa", "eager")}
    ways |= {"auto": {}, "shared": {"shared_prefix": "on"}, "apart": {"shared_prefix": "off"}}
    for name, settings in ways.items():
        trainer = build(folder, **settings)
        trainer.step(1)
        assert trainer.last_rollout is not None
        rollout, *_ = trainer.last_rollout
        batches = trainer.micro_batches(rollout, range(len(rollout.completions)))
        seen[name] = {
            "metrics": trainer.meter.reduce(),
            "computed": sum(micro.input_ids_bS.numel() for micro in batches),
            "real": rollout.num_tokens + sum(len(prompt.token_ids) for prompt in rollout.row_prompts),
            "rows": len(rollout.completions),
        }
    return seen


def unpacked(folder: Path) -> dict[str, Any]:
    """Steps of a model that cannot be packed, on generate()."""
    trainer = build(folder, model=UNPACKED, rollout={"decoder": "transformers"}, stage=2)
    metrics = []
    for step in (1, 2):
        trainer.step(step)
        metrics.append(trainer.meter.reduce())
    return {"packs": trainer.policy.packs, "metrics": metrics}


def iterations(folder: Path) -> dict[str, Any]:
    """Two passes of two minibatches over one rollout, with a reference that is counted."""
    trainer = build(folder, beta=0.1, num_minibatches=2, num_iterations=2)
    assert trainer.reference is not None
    calls: Counter[str] = Counter()
    for name, part in (("rollout", trainer.policy), ("logprobs", trainer.reference), ("step", trainer.policy)):
        setattr(part, name, counted(calls, name, getattr(part, name)))
    trainer.step(1)
    return {"calls": dict(calls), "metrics": trainer.meter.reduce()}


def export(folder: Path) -> dict[str, Any]:
    """How far the reference is from the starting policy, and the exported model from the trained one, in nats."""
    from transformers import AutoModelForCausalLM

    from hybrid_grpo.generation import GREEDY, Request, Sampling, generate
    from hybrid_grpo.model.attention import ATTENTION

    trainer = build(folder, beta=0.1)
    assert trainer.reference is not None and build(folder, beta=0.0).reference is None
    rollout = trainer.sample(trainer.draw_prompts(), 1)
    batches = trainer.micro_batches(rollout, range(len(rollout.completions)))
    width = max(len(c.token_ids) for c in rollout.completions)
    ref_logp_BT = trainer.reference.logprobs(batches, (len(rollout.completions), width), 1.0)
    apart = 0.0
    for micro in batches:
        logp_bT, _ = trainer.policy.forward(micro, 1.0)
        if micro.rows:
            apart = max(apart, float((logp_bT - ref_logp_BT[micro.rows, : logp_bT.shape[1]]).abs().max()))
    for step in (1, 2):
        trainer.step(step)
    trainer.policy.export(folder / "exported")
    torch.distributed.barrier()

    requests = [Request(prompt.token_ids, [0]) for prompt in rollout.prompts]

    def decoded(model: Any) -> list[tuple[list[int], list[float]]]:
        groups, _ = generate(model, requests, Sampling(16, temperature=GREEDY))
        return [(group[0].token_ids, group[0].logp) for group in groups]

    with trainer.policy.engine.generation() as view:
        ours = decoded(view)
    loaded, start = (
        AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation=ATTENTION).eval().to(trainer.device)
        for name in ("exported", "model")
    )
    theirs = decoded(loaded)
    assert [token_ids for token_ids, _ in theirs] == [token_ids for token_ids, _ in ours]
    gaps = [
        abs(a - b) for (_, one), (_, other) in zip(theirs, ours, strict=True) for a, b in zip(one, other, strict=True)
    ]
    return {
        "reference": apart,
        "exported": max(gaps),
        "trained": decoded(start) != ours,
        "tied": loaded.lm_head.weight is loaded.model.embed_tokens.weight,
    }


def switch(folder: Path) -> dict[str, Any]:
    """What happens between gather and release, and after an error."""
    trainer = build(folder)
    policy, seen = trainer.policy, {}
    prompts = trainer.draw_prompts()
    calls = count_collectives()

    with policy.engine.generation() as view:
        seen["gather"] = dict(calls)
        calls.clear()
        # Nothing inside may wait for the other rank: the second begins when the first is done.
        from hybrid_grpo.generation import Request, Sampling, generate

        requests = [Request(p.token_ids, [0, 1]) for p in prompts]
        # The first call also finds out which kernels the model can take.
        generate(view, requests, Sampling(1))
        done = folder / "first_is_done"
        seen["in_turn"] = rank() == 0 or in_time(done.exists, 120)
        generate(view, requests, Sampling(4 if rank() == 0 else 48))
        done.touch()
        seen["inside"] = dict(calls)
        seen["hooks"] = sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in view.modules()
        )
        seen["training"] = view.training
        try:
            with policy.engine.generation():
                pass
        except RuntimeError as error:
            seen["nested"] = str(error)
        calls.clear()
    seen["release"] = dict(calls)
    seen["empty_after"] = all(p.numel() == 0 for p in policy.engine._view.module.parameters())

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    try:
        with policy.engine.generation():
            if rank() == 1:
                time.sleep(4)
                raise KeyError("mine")
    except Exception as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=30))
    try:
        with policy.engine.generation():
            if rank() == 1:
                raise RunStopped("no memory")
    except RunStopped as stop:
        seen["stopped"] = str(stop)
    trainer.step(1)
    seen["after"] = trainer.meter.reduce()["policy/grad_norm"]
    return seen


def kept(folder: Path) -> dict[str, Any]:
    """Rollouts, evaluations and training with the memory of decoding kept, on a double of CUDA graphs that checks every
    address; beside the rollouts of steps that are not captured."""
    sys.path.append(str(Path(__file__).parents[1] / "doubles"))
    from cuda_graphs import Captures

    from hybrid_grpo.generation import loop
    from hybrid_grpo.model.kernels import build as kernels

    kernels.load = lambda: None  # type: ignore[assignment]
    zero = {"stage3_param_persistence_threshold": 0}
    trainer = build(folder, workspace=Workspace(16, 40), deepspeed={"zero_optimization": zero})
    policy, config, stop_ids = trainer.policy, trainer.config.rollout, trainer.inputs.stop_ids
    prompts, captures, held_out = trainer.draw_prompts(), Captures(), trainer.eval_sets[0]
    seen: dict[str, Any] = {"captures": [], "same": [], "addresses": []}
    emptied = engines.get_accelerator().empty_cache = Mock()

    def rollout(step: int, capture: Any) -> tuple[list[list[int]], int]:
        loop.capture_on = lambda _: capture
        sampled, stats = policy.rollout(prompts, config, stop_ids, seed=0, step=step)
        return [c.token_ids for c in sampled.completions], stats.captures

    for step in (1, 2, 3):
        tokens, count = rollout(step, captures)
        seen["captures"].append(count)
        policy.complete(held_out.requests(held_out.own_prompts()), held_out.sampling, config)
        with policy.engine.generation() as view:
            seen["addresses"].append([p.data_ptr() for p in view.parameters()])
        seen["same"].append(rollout(step, None)[0] == tokens)
        trainer.step(step)
    seen["graphs"], seen["replays"] = len(captures.forwards), captures.replays
    seen["empty_after"] = all(p.numel() == 0 for p in policy.engine._view.module.parameters())
    seen["emptied"] = [emptied.call_count]
    policy.engine._view.keeps = False
    with policy.engine.generation():
        seen["emptied"].append(emptied.call_count)
    return seen


def save(trainer: Trainer, folder: Path, tag: str) -> None:
    """As a run saves a checkpoint."""
    state = {name: part.state_dict() for name, part in trainer.all_parts.items()}
    trainer.policy.engine.save(folder, tag, {"policy": trainer.policy.state_dict(), **state})
    if trainer.shards is not None:
        trainer.shards.save(folder / tag)
    barrier()


def restore(trainer: Trainer, folder: Path, tag: str) -> None:
    """As a run goes on from a checkpoint."""
    state = trainer.policy.engine.load(folder, tag)
    if trainer.shards is not None:
        trainer.shards.load(folder / tag)
    trainer.policy.load_state_dict(state["policy"])
    for name, part in trainer.all_parts.items():
        part.load_state_dict(state[name])


def main(programs: dict[str, Any]) -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    seen = programs[name](folder)
    target = folder if folder.is_dir() else folder.parent
    suffix = "" if folder.is_dir() else f".{folder.name}"
    (target / f"{name}{suffix}.{world_size()}.{rank()}.json").write_text(json.dumps(seen))
    # As the command line does: the interpreter's shutdown is not safe after DeepSpeed.
    os._exit(0)


if __name__ == "__main__":
    main(globals())
