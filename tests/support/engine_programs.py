"""Programs about the engine, and DeepSpeed's own settings; see rank_programs.py."""

import io
import weakref
from collections import Counter
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import z3_leaf_module
from memory_plans import GPU, SIZES
from rank_programs import build, main, two_steps
from transformers import modeling_utils

from hybrid_grpo import engine
from hybrid_grpo.config import EngineConfig, PolicyConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed.ranks import all_reduce, barrier, rank, world_size
from hybrid_grpo.distributed.shards import GradientBuffers, ParkedStates
from hybrid_grpo.model.layers import fuse
from hybrid_grpo.model.loading import load_model
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.run.memory.dry_run import power_of_two
from hybrid_grpo.run.memory.optimizer import states
from hybrid_grpo.run.memory.plan import Plan

_ALL_SHARDED = {"stage3_param_persistence_threshold": 0}
_FROM_HOST = {"offload_param": {"device": "cpu"}, **_ALL_SHARDED}
_AS_IF_LARGE = {"stage3_max_reuse_distance": 0, **_ALL_SHARDED}
"""Weights are released after forward, as those of large models are, and gathered again for backward."""


def sections(folder: Path) -> dict[str, Any]:
    """Two steps with each of some sections of engine.deepspeed, and what DeepSpeed says at their end."""
    flops = folder / "flops.txt"
    seen: dict[str, Any] = {}
    for name, deepspeed in {
        "offload_param": {"zero_optimization": _FROM_HOST},
        "flops_profiler": {"flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(flops)}},
        "comms_logger": {"comms_logger": {"enabled": True}},
    }.items():
        trainer = build(folder, deepspeed=deepspeed)
        seen[name] = two_steps(trainer)
        with redirect_stdout(io.StringIO()) as told:
            trainer.policy.engine.print_communication()
        seen[name]["communication"] = told.getvalue()
        seen[name]["offloads"] = trainer.policy.engine.engine.optimizer.offload_param
    seen["flops"] = flops.read_text() if flops.is_file() else ""
    seen["linear"] = torch.nn.functional.linear is torch._C._nn.linear
    return seen


def hpz(folder: Path) -> dict[str, Any]:
    """Two steps with a second copy of the weights in each pair of ranks: on four ranks, as on two machines of two.

    DeepSpeed's groups of ranks are those of the process, so this needs a program of its own.
    """
    zero = {"zero_hpz_partition_size": 2, "stage3_prefetch_bucket_size": 0, **_AS_IF_LARGE}
    gathers: Counter[str] = Counter()
    gather = dist.all_gather_into_tensor

    def watched(*args: Any, **kwargs: Any) -> Any:
        gathers[str(dist.get_world_size(kwargs.get("group")))] += 1
        return gather(*args, **kwargs)

    # Before DeepSpeed starts and takes it.
    dist.all_gather_into_tensor = watched
    trainer = build(folder, beta=0.1, num_minibatches=2, deepspeed={"zero_optimization": zero})
    seen = two_steps(trainer)
    assert trainer.last_rollout is not None
    trainer.scored(trainer.last_rollout[0], trainer.policy)
    parameters = list(trainer.policy.engine.engine.module.parameters())
    seen["shards"] = [(p.ds_numel, p.ds_tensor.numel(), p.ds_secondary_tensor.numel()) for p in parameters]
    seen["gathers"] = gathers
    return seen


def pinned(folder: Path) -> list[tuple[int, int]]:
    """By ZeRO stage, what an offloaded optimizer takes of pinned memory, as on a GPU, and what the plan says."""
    seen = []
    for stage in (1, 2, 3):
        kept: list[tuple[weakref.ref[Any], int]] = []

        def pin(tensor: torch.Tensor, kept: list[Any] = kept) -> torch.Tensor:
            copy = tensor.clone()
            kept.append((weakref.ref(copy.untyped_storage()), power_of_two(copy.nbytes)))
            return copy

        zero = {"offload_optimizer": {"pin_memory": True}, "sub_group_size": 300_000}
        with mock.patch.object(engine.get_accelerator(), "pin_memory", pin):
            trainer = build(folder, stage=stage, offload=True, dtype="bfloat16", deepspeed={"zero_optimization": zero})
            trainer.step(1)
        taken = sum(size for storage, size in kept if storage() is not None)
        counts = [getattr(p, "ds_numel", p.numel()) for p in trainer.policy.engine.engine.module.parameters()]
        sizes = replace(SIZES, parameters=sum(counts), trained=sum(counts), largest=max(counts))
        plan = Plan(trainer.config, sizes, batch_plan(trainer.config, 1), 512, GPU)
        masters, _, gradients = states(plan)
        seen.append((taken, gradients.bytes + (masters.bytes if stage < 3 else 0)))
    return seen


class Unreadable(ParkedStates):
    """States that are nowhere between steps, instead of on another device."""

    def _park(self) -> None:
        super()._park()
        self.away = [(tensor, tensor.data) for tensor in self._tensors()]
        for tensor, _ in self.away:
            tensor.data = tensor.new_empty(0)

    def on_device(self) -> Any:
        for tensor, data in self.away:
            tensor.data = data
        return super().on_device()


def parked(folder: Path) -> list[tuple[Any, Any, int, int]]:
    """Two steps at ZeRO-2 and 3 in both types, as they are and with states that nothing can read between steps, nor
    gradients in rollouts at stage 3; how many tensors the states were, and the bytes of gradients in a rollout."""
    seen = []
    for stage, dtype, beta in ((2, "float32", 0.0), (2, "bfloat16", 0.1), (3, "float32", 0.1), (3, "bfloat16", 0.0)):
        plain = two_steps(build(folder, stage=stage, dtype=dtype, beta=beta, num_minibatches=2))
        trainer = build(folder, stage=stage, dtype=dtype, beta=beta, num_minibatches=2, offload="between_steps")
        engine = trainer.policy.engine
        engine._parked = away = Unreadable(engine.engine.optimizer, stage, engine.device)
        gather, sizes = engine._view.gather, [1]

        def gathered(of: Any = engine.engine.optimizer, sizes: Any = sizes, gather: Any = gather, **how: Any) -> None:
            buffers = [of.grad_partitions_flat_buffer, *(bucket.buffer for bucket in of.ipg_buckets.values())]
            sizes[0] = sum(buffer.untyped_storage().nbytes() for buffer in buffers)
            gather(**how)

        if stage == 3:
            engine._gradients = GradientBuffers(engine.engine.optimizer, engine.device)
            engine._view.gather = gathered
        seen.append((plain, two_steps(trainer), len(away.away), sizes[0]))
    return seen


def streaming(folder: Path) -> dict[str, Any]:
    """Three steps with a reference that is far larger than what is fetched ahead of use.

    For each forward of the reference: how many weights nobody had asked for when their layer began, and the most
    numbers that were fetched at once.
    """
    ahead = {"stage3_prefetch_bucket_size": 1e4, "stage3_max_live_parameters": 1e5}
    trainer = build(folder, beta=0.1, deepspeed={"zero_optimization": {**ahead, **_ALL_SHARDED}})
    assert trainer.reference is not None
    engine = trainer.reference.engine.engine
    parameters = list(engine.module.parameters())
    coordinator = engine.optimizer.get_param_coordinator()
    late: list[int] = []
    held: list[int] = []
    fetch = coordinator.fetch_sub_module

    def fetched() -> list[Any]:
        return [p for p in parameters if p.ds_status.name != "NOT_AVAILABLE"]

    def watched(module: Any, forward: bool) -> None:
        if module is engine.module:
            late.append(0)
            held.append(0)
        late[-1] += len(set(module.parameters(recurse=False)) - set(fetched()))
        fetch(module, forward)
        held[-1] = max(held[-1], sum(p.ds_numel for p in fetched()))

    coordinator.fetch_sub_module = watched
    for step in (1, 2, 3):
        trainer.step(step)
        trainer.reference.refresh(trainer.policy, 0.5)
    numbers = sum(p.ds_numel for p in parameters)
    return {"parameters": len(parameters), "numbers": numbers, "late": late, "held": held}


def fused(folder: Path) -> dict[str, Any]:
    """The loss of one micro-batch, the gradient norm, and a norm's weights after three steps; with
    the layers of transformers and with fused ones, whose weights are gathered by the hooks of their modules. And how
    many of its weights each layer waits for in the last step, where by DeepSpeed's default 1,000 numbers of its 147,000
    would be fetched ahead."""
    DeepSpeedZeroConfig.model_fields["prefetch_bucket_size"].default = 1000
    DeepSpeedZeroConfig.model_rebuild(force=True)
    late: list[int] = []
    seen: dict[str, Any] = {"late": late}

    def watched(fetch: Any, module: Any, forward: bool) -> None:
        if z3_leaf_module(module):
            late.append(sum(p.ds_status.name == "NOT_AVAILABLE" for p in module.parameters()))
        fetch(module, forward)

    for name in ("own", "fused"):
        trainer = build(folder, gradient_checkpointing=True, deepspeed={"zero_optimization": _AS_IF_LARGE})
        model = trainer.policy.engine.engine.module.model
        coordinator = trainer.policy.engine.engine.optimizer._get_param_coordinator()
        coordinator.fetch_sub_module = partial(watched, coordinator.fetch_sub_module)
        if name == "fused":
            fuse(model, None)
            assert sum("forward" in module.__dict__ for module in model.base_model.modules()) > 6
        for _ in range(3):  # DeepSpeed notes the order of weights in the first two, and follows it in the third
            late.clear()
            [micro] = trainer.policy.micro_batches(TokenRow.of([[1 + rank(), 2, 3]], [[4, 5, 6, 7]]))
            logp_bT, _ = trainer.policy.forward(micro, 1.0)
            trainer.policy.engine.backward(-logp_bT.sum())
            norm = trainer.policy.step().grad_norm
        weights = [parameter for label, parameter in model.named_parameters() if "norm" in label]
        whole = trainer.policy.engine.whole(weights)
        seen[name] = [[float(logp_bT.detach().sum()), norm], *(whole[weight].flatten().tolist() for weight in weights)]
    return seen


def losses(folder: Path) -> dict[str, Any]:
    """Ten training losses, with and without a generation phase between them: the same forwards and backwards."""
    seen: dict[str, Any] = {}
    trainer = build(folder, prompts_per_step=4)
    rollout = trainer.sample(trainer.draw_prompts(), 1)
    batches = trainer.micro_batches(rollout, range(len(rollout.completions)))
    initial = folder / f"initial.{world_size()}"
    trainer.policy.engine.save(initial, "start", {})
    barrier()
    for name in ("without", "with"):
        trainer.policy.engine.load(initial, "start")
        seen[name] = []
        for step in range(10):
            if name == "with":
                trainer.policy.rollout(
                    rollout.prompts, trainer.config.rollout, trainer.inputs.stop_ids, seed=0, step=step
                )
            total = torch.zeros((), device=trainer.device)
            for micro in batches:
                logp_bT, _ = trainer.policy.forward(micro, 1.0)
                loss = -logp_bT.sum() / 100 if micro.rows else 0.0 * logp_bT.sum()
                trainer.policy.engine.backward(loss)
                total += loss.detach()
            trainer.policy.step()
            seen[name].append(float(all_reduce(total)))
    return seen


def nonfinite(folder: Path) -> dict[str, Any]:
    """A gradient that is not finite on one rank: every stage skips it on all, and goes on, even with nothing."""
    stage = int(folder.name[-1])
    trainer = build(folder.parent, stage=stage)
    rollout = trainer.sample(trainer.draw_prompts(), 1)
    batches = trainer.micro_batches(rollout, range(len(rollout.completions)))
    seen: dict[str, Any] = {"applied": [], "norms": [], "logp": []}
    for bad in (False, True, False, None):
        for i, micro in enumerate(trainer.policy.micro_batches([]) if bad is None else batches):
            logp_bT, _ = trainer.policy.forward(micro, 1.0)
            if i == 0 and micro.rows:
                seen["logp"].append(float(logp_bT.detach().sum()))
            scale = float("inf") if bad and rank() == world_size() - 1 and i == 0 else 1.0
            loss = -logp_bT.sum() / 100 * scale if micro.rows else 0.0 * logp_bT.sum()
            trainer.policy.engine.backward(loss)
        result = trainer.policy.step()
        seen["applied"].append(result.applied)
        seen["norms"].append(str(result.grad_norm))
    assert not trainer.policy.logprobs(trainer.policy.micro_batches([], gradients=False), (2, 3), 1.0).any()
    micro = batches[0]
    seen["logp"].append(float(trainer.policy.forward(micro, 1.0)[0].detach().sum()))
    seen["skipped"] = trainer.policy.skipped_steps
    return seen


def buffers(folder: Path) -> dict[str, Any]:
    """The rotary frequencies of a model in bfloat16 below ZeRO-3 and under it; and what is said where transformers does
    not guard them from `zero.Init`."""
    engine.start()
    policy = PolicyConfig(model=str(folder / "model"))
    seen: dict[str, Any] = {}

    def load(stage: int) -> Any:
        with engine.sharded_loading(engine.policy_config(policy, EngineConfig(zero_stage=stage))):
            return load_model(policy).model.rotary_emb.inv_freq

    seen["types"] = [str(load(stage).dtype) for stage in (0, 3)]
    seen["equal"] = torch.equal(load(0), load(3))
    with mock.patch.object(modeling_utils, "prevent_arange_dtype_change", nullcontext):
        seen["unguarded below"] = torch.equal(load(0), load(2))
        try:
            load(3)
        except UserError as error:
            seen["refused"] = str(error)
    return seen


if __name__ == "__main__":
    main(globals())
