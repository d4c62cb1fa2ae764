"""The memory of DeepSpeed's optimizer by ZeRO stage: its states, the gradients, and the copies made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_grpo.run.memory import remedies
from hybrid_grpo.run.memory.dry_run import power_of_two
from hybrid_grpo.run.memory.phases import Part

if TYPE_CHECKING:
    from hybrid_grpo.run.memory.plan import Plan


def states(plan: Plan) -> list[Part]:
    """Return Adam's states; with offloading, also the gradients that it reads and the weights it copies back."""
    # Stages 1 and 2 clone their partition in any type, 0 has no masters, and 3 steps float32 weights in place.
    clones = plan.stage in (1, 2) or plan.offloads or (plan.stage == 3 and plan.dtype == 2)
    masters, moments, offloaded = 4 * plan.owned if clones else 0, 8 * plan.owned, 0
    if plan.offloads and plan.stage == 3:
        offloaded = _pinned(plan, 4 * plan.owned, *_groups(plan))
    elif plan.offloads:
        masters, in_type = _pinned(plan, masters), (plan.dtype * plan.owned, plan.dtype * plan.sizes.largest)
        # Float32 gradients of several micro-batches add up in tensors of their own.
        offloaded = _pinned(plan, 4 * plan.owned, *in_type) + (4 * plan.owned if plan.dtype == 4 else 0)
    sizes = {"float32 masters": masters, "Adam's moments": moments, "offloaded gradients": offloaded}
    return [Part(name, size, remedies.fewer_states(plan)) for name, size in sizes.items()]


def parked(plan: Plan) -> list[Part]:
    """Return what Adam's states take in pinned memory, where they are between steps on the GPU."""
    rounded = sum(map(power_of_two, _groups(plan)))
    return [Part(part.name, part.bytes * rounded // (4 * plan.owned)) for part in states(plan)]


def gradients(plan: Plan) -> Part:
    """Return the gradients that exist from the first backward pass to the optimizer step."""
    # torch.empty of the whole bucket: on a CPU, pages that are never written to take no memory.
    bucket = plan.bucket if plan.gpu else min(plan.t, plan.bucket)
    # Stage 0 has no bucket; stage 1 reduces what it has added up in float32.
    staged = plan.buckets * bucket * {0: 0, 1: 4}.get(plan.stage, plan.dtype)
    staged += plan.dtype * plan.sizes.largest if plan.offloads and plan.stage < 3 else 0  # on its way to the host
    # Stages 1 and 2 add up bfloat16 gradients on the device, wherever their optimizer is.
    leaves = plan.offloads and (plan.stage == 3 or plan.dtype == 4)
    own, remedy = (0, remedies.smaller_buckets(plan)) if leaves else (4 * plan.owned, remedies.fewer_states(plan))
    return Part("gradients", staged + own, remedy)


def reduction(plan: Plan) -> Part:
    """Return the copies made while a bucket is reduced; stage 3 lays the shards of all ranks side by side."""
    # A gradient that is larger than the bucket is reduced on its own.
    elements = min(plan.t, max(plan.bucket, plan.sizes.largest))
    copies = plan.dtype * elements if plan.stage in (1, 3) else 0
    # Stage 3 sums bfloat16 and keeps float32.
    own = 4 * elements // plan.ranks if plan.stage == 3 and plan.dtype == 2 else 0
    return Part("reduction", copies + own, remedies.smaller_buckets(plan))


def stepping(plan: Plan) -> list[Part]:
    """Return what an optimizer step adds: states that are elsewhere between steps, and gradients in one float32
    tensor."""
    # Stages 1 and 2 have already added up bfloat16 gradients in one float32 tensor.
    whole = min(plan.t, plan.bucket) if plan.stage == 0 else plan.owned
    flat = 0 if plan.stage in (1, 2) and plan.dtype == 2 else 4 * whole
    step = Part("step", 0 if plan.gpu and plan.offloads else flat, remedies.fewer_states(plan))
    return [*(states(plan) if plan.parks else []), step]


def _groups(plan: Plan) -> list[int]:
    """Return the bytes in float32 of the groups of weights that are stepped one after the other."""
    size = plan.sub_group if plan.stage == 3 else plan.owned
    return [4 * min(size, plan.owned - start) for start in range(0, plan.owned, size)]


def _pinned(plan: Plan, *sizes: int) -> int:
    """Return the bytes that allocations of an offloaded optimizer take, of which DeepSpeed pins these on a GPU."""
    return sum(map(power_of_two, sizes)) if plan.pins else sum(sizes)
