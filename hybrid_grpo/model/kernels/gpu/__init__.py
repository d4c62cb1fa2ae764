"""Triton kernels for GPUs, each with a torch path in the module that calls it.

Triton comes with torch's builds for GPUs; without it torch computes everything. A kernel is used only if its caller has
checked, once on the device, that it agrees with torch; see `tried`.
"""

from hybrid_grpo.model.kernels.gpu.launcher import fall_back, fallbacks, proven, slow_ranks, tried, triton, usable

if triton is not None:
    from hybrid_grpo.model.kernels.gpu import (
        attention,
        gate,
        norm,
        products,
        rotation,
        sampling,
        softmax,
        states,
        tilings,
    )

__all__ = ["fall_back", "fallbacks", "proven", "slow_ranks", "tried", "usable"]
__all__ += ["attention", "gate", "norm", "products", "rotation", "sampling", "softmax", "states", "tilings"]
