"""What makes a part of the memory plan smaller: changes that are not made yet, the best first, separated by commas.

A change is `more ranks`, or a setting with a value. Whether it makes the run smaller is found out in shortage.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_grpo.data.packing import token_budget

if TYPE_CHECKING:
    from hybrid_grpo.run.memory.plan import Plan

_ZERO = "engine.deepspeed.zero_optimization"
HOSTED = f"{_ZERO}.offload_param.device cpu"
ONE_SHARD = f"{_ZERO}.zero_hpz_partition_size 1"
_SHORTEST = 64
"""Completions, in tokens, that are not proposed to become shorter."""
_FEWEST_SLOTS, _SHORTEST_PREFILL, _SMALLEST_BUCKET = 8, 512, 10**7
"""Slots, tokens of a prefill and elements of a bucket below which a run is too slow to be proposed."""


def smaller_buckets(plan: Plan) -> str:
    elements = min(plan.t, plan.bucket)
    return f"{_ZERO}.reduce_bucket_size {max(_SMALLEST_BUCKET, elements // 2)}" if elements > _SMALLEST_BUCKET else ""


def fewer_slots(plan: Plan) -> str:
    slots = plan.laid_out
    return f"rollout.max_slots {max(_FEWEST_SLOTS, slots // 2)}" if slots > _FEWEST_SLOTS else ""


def shorter_prefills(tokens: int) -> str:
    return f"rollout.prefill_tokens {max(_SHORTEST_PREFILL, tokens // 2)}" if tokens > _SHORTEST_PREFILL else ""


def shorter_completions(plan: Plan) -> str:
    half = plan.config.rollout.max_completion_tokens // 2
    return f"rollout.max_completion_tokens {half}" if half >= _SHORTEST else ""


def more_shards(plan: Plan, stage: int) -> str:
    """Return what divides a part by more ranks, if it is divided from this ZeRO stage on."""
    # By default more ranks also have a higher stage.
    return "more ranks" if plan.stage >= stage or plan.config.engine.zero_stage is None else "engine.zero_stage 3"


def fewer_weights(plan: Plan) -> str:
    """Return what makes the weights that are always there smaller. In four bits, every rank has all of them."""
    packed = "lora.load_in_4bit true, " if plan.config.lora.rank and plan.stage < 3 else ""
    return "" if plan.packed else f"{packed}{more_shards(plan, 3)}, {HOSTED}"


def fewer_states(plan: Plan) -> str:
    """Return what makes the optimizer's part of a rank's memory smaller."""
    move = "engine.offload_optimizer true, " if plan.gpu and plan.stage else ""
    if plan.can_park:
        move = f"engine.offload_optimizer between_steps, {move}"
    if plan.offloads:
        move = "engine.zero_stage 3, " if plan.stage < 3 else ""  # gradients leave the GPU too
    return f"{move}{more_shards(plan, 1)}" + ("" if plan.config.lora.rank else ", lora.rank 16")


def smaller_micro_batches(plan: Plan, recomputed: bool = False) -> str:
    """Return what makes activations smaller, if it is not set yet; some are `recomputed` with checkpointing too."""
    policy = plan.config.policy
    budget = token_budget(policy, on_gpu=plan.gpu, gradients=True)
    twice, heads = 2 * plan.config.engine.sequence_parallel, plan.sizes.shared_heads
    longest = -(-2 * plan.longest // twice)
    rows = min(budget // longest, plan.rows // plan.batch.num_minibatches)
    fewer = shorter_completions(plan)
    if rows > 1:
        # A row that is longer than the budget gets a micro-batch of its own.
        fewer = f"policy.micro_batch_tokens {longest * (rows // 2) if rows > 3 else longest // 2}"
    elif heads and heads % twice == plan.ranks % twice == 0:
        fewer = f"engine.sequence_parallel {twice}, {fewer}"
    recompute = "" if recomputed or policy.gradient_checkpointing else "policy.gradient_checkpointing true"
    moved = "" if recomputed or not plan.gpu else "policy.gradient_checkpointing offload" * (not recompute)
    return ", ".join(filter(None, (recompute, fewer, moved)))


def less_fetched(plan: Plan) -> str:
    """Return what lets ZeRO-3 gather fewer weights at once; it gathers whole tensors."""
    elements, least = min(plan.n, plan.live), plan.sizes.largest
    return f"{_ZERO}.stage3_max_live_parameters {max(least, elements // 2)}" if elements > least else ""
