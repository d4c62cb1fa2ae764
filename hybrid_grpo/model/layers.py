"""Layers of transformers models with fused kernels on a GPU, in training and where prompts are read.

Modules are tested rather than listed: a module keeps its own code unless it computes, on a few numbers on the CPU, what
a kernel does, rounding included. Its weights are not read for that, as they may be sharded. Modules still call each
other, so that an engine's hooks, which gather weights, and adapters still run.
"""

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybrid_grpo.model.kernels import gpu

ROTATION = "apply_rotary_pos_emb"
"""transformers' name for the function of a model's module that rotates queries and keys."""
TILE = 8192
"""Tokens of a tile of a long MLP, enough for full speed."""
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ALIKE = 0.97
"""Least share of results in bfloat16 that are equal to the bit. Another rounding changes a tenth of them or more."""
_TOLERANCE = 4
"""Largest root mean square error of a kernel, in units of the type's precision; a rounding makes about 0.3."""

_prepared: WeakSet[Any] = WeakSet()
_rotating: ContextVar[bool] = ContextVar("rotating", default=False)
"""Whether the attention of a fused model is running: others call the same function."""


def install_fused_layers(model: Any, like: Tensor) -> None:
    """Make a model's norms, MLPs, rotations and layers use the kernels, if `like` is on a GPU. Each kernel is first
    compared with torch there; where it differs, a warning is issued, and the modules keep their own code."""
    if model not in _prepared and gpu.usable(like):
        _prepared.add(model)
        # Generation may be the first to ask, where no gradient can be checked.
        with torch.inference_mode(False), torch.enable_grad():
            fuse(model, like.device)


def fuse(model: Any, device: torch.device | None) -> None:
    """Replace the forwards of the modules that compute what the kernels do. Without a `device` the kernels are not
    compared with torch, as for a dry run, which computes nothing. Without Triton nothing is replaced."""
    if not gpu.usable():
        return

    def right(check: Callable[..., bool], *case: Any) -> bool:
        return device is None or gpu.proven("training", check, device, model.dtype, *case)

    for module in model.modules():
        if "forward" not in module.__dict__ and (forward := _fused(module, right)) is not None:
            module.forward = forward
    for layer in model.modules():
        if is_residual_layer(layer):
            norms = layer.input_layernorm, layer.post_attention_layernorm
            if all(getattr(vars(norm).get("forward"), "func", None) is _normed for norm in norms):
                layer.__class__ = _with_residuals(layer.__class__)


def tile_mlps(model: Any) -> None:
    """Make gated MLPs of long rows compute some tokens at a time, and their activations again in backward."""
    for module in filter(is_gated_mlp, model.modules()):
        module.forward = functools.partial(_in_tiles, module.forward)


def _in_tiles(forward: Any, x: Tensor) -> Tensor:
    if x.shape[-2] <= 2 * TILE:
        out: Tensor = forward(x)
        return out
    return torch.cat([checkpoint(forward, part, use_reentrant=False) for part in x.split(TILE, dim=-2)], dim=-2)


def _fused(module: Any, right: Callable[..., bool]) -> Callable[..., Any] | None:
    """Return a forward with a kernel for a module that computes what it does, if its check is `right`; else None."""
    own, formula = inspect.unwrap(type(module).forward), norm_formula(module)
    if formula is not None and right(_norm_agrees, _size(module), formula):
        return functools.partial(_normed, module, module.forward, formula)
    if is_gated_mlp(module) and right(_gate_agrees):
        return functools.partial(_gated, module)
    rotates = ROTATION in getattr(getattr(own, "__code__", None), "co_names", ())
    if rotates and _install_rotation(sys.modules[own.__module__]) and right(_rotation_agrees):
        return functools.partial(_with_rotation, module.forward)
    return None


# The forwards of fused modules.


def _normed(module: Any, original: Any, formula: Any, x: Tensor, *residual: Tensor | None) -> Any:
    """The norm of x; with a residual, which may be None, the sum of both and its norm."""
    if x.dtype == module.weight.dtype:
        total, out = gpu.norm.AddNorm.apply(x, *(residual or (None,)), module.weight, formula)
    else:
        total = x if not residual or residual[0] is None else residual[0] + x
        out = original(total)
    return (total, out) if residual else out


def _gated(module: Any, x: Tensor) -> Tensor:
    # Without names for gate and up, which would keep them while the product is projected.
    return module.down_proj(gpu.gate.SiluTimes.apply(module.gate_proj(x), module.up_proj(x)))


def _with_rotation(original: Any, *args: Any, **more: Any) -> Any:
    token = _rotating.set(True)
    try:
        return original(*args, **more)
    finally:
        _rotating.reset(token)


def _rotation(original: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **more: Any) -> Any:
    """`apply_rotary_pos_emb`, for q [rows, heads, length, d] and k [rows, kv, length, d]."""
    fits = _rotating.get() and not args and not more and q.dtype == k.dtype == cos.dtype and cos.dim() == 3
    return gpu.rotation.Rotate.apply(q, k, cos, sin) if fits else original(q, k, cos, sin, *args, **more)


def _layer(layer: Any, hidden_states: Tensor, **more: Any) -> Tensor:
    residual, x = layer.input_layernorm(hidden_states, None)
    x, _ = layer.self_attn(hidden_states=x, **more)
    residual, x = layer.post_attention_layernorm(x, residual)
    out: Tensor = residual + layer.mlp(x)
    return out


@functools.cache
def _with_residuals(kind: Any) -> Any:
    """Return a layer's class with the forward `_layer`. transformers puts checkpointing around the forward of a class,
    or the call of an instance, depending on its version; a subclass has it either way."""
    return type(kind.__name__, (kind,), {"forward": _layer, "__module__": kind.__module__})


def _install_rotation(module: Any) -> bool:
    """Make the rotation of a module of transformers use the kernel in fused models, if it computes the same."""
    original = getattr(module, ROTATION)
    if not hasattr(original, "replaces"):
        if not is_rotation(original):
            return False
        replaced = functools.partial(_rotation, original)
        functools.update_wrapper(replaced, original).replaces = original  # type: ignore[attr-defined]
        setattr(module, ROTATION, replaced)
    return True


# What modules compute, found out on a few numbers.


def _drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, phase: float = 0.0) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count) * 1.7 + phase).mul(2.0).view(shape).to(dtype)


def _stubbed(module: Any, **parts: Any) -> Any:
    """A copy of a module with these functions or weights in the place of its own."""
    twin = copy.copy(module)
    twin._parameters = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
    twin._modules = {**module._modules, **{name: part for name, part in parts.items() if callable(part)}}
    return twin


@torch.no_grad()
def _alike(found: Callable[[], Any], expected: Callable[[], Any]) -> bool:
    """Whether two functions have the same results, almost all to the bit."""
    try:
        theirs, ours = found(), expected()
        if isinstance(theirs, Tensor) and isinstance(ours, Tensor):
            theirs, ours = (theirs,), (ours,)
        pairs = zip(theirs, ours, strict=True)
        return all(a.dtype == b.dtype and float((a == b).float().mean()) > _ALIKE for a, b in pairs)
    except Exception:  # a module that computes something else may raise anything
        return False


def _size(module: Any) -> int:
    """The elements of a norm's weight, which may be sharded."""
    return int(getattr(module.weight, "ds_shape", module.weight.shape)[-1])


def norm_formula(module: Any) -> Any | None:
    """Return the `Formula` of an RMS norm of vectors; None if a module computes something else."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float) or set(module._parameters) != {"weight"} or module._modules:
        return None
    weight = module._parameters["weight"]
    if weight is None or len(getattr(weight, "ds_shape", weight.shape)) != 1:
        return None
    size = _size(module)
    if size > gpu.norm.WIDEST:
        return None
    for formula in (gpu.norm.Formula(epsilon, *which) for which in ((0.0, True), (0.0, False), (1.0, False))):
        if all(_follows(module, formula, size, dtype) for dtype in (torch.bfloat16, torch.float32)):
            return formula
    return None


def _follows(module: Any, formula: Any, size: int, dtype: torch.dtype) -> bool:
    x, weight = _drawn(max(2, 1024 // size), size, dtype=dtype), _drawn(size, dtype=dtype, phase=0.5)
    forward = type(module).forward
    return _alike(lambda: forward(_stubbed(module, weight=weight), x), lambda: rms_norm(x, weight, formula))


def rms_norm(x: Tensor, weight: Tensor, formula: Any) -> Tensor:
    """The norm in torch, rounded where `formula` says; in float64 for float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + formula.epsilon)
    normed = normed.to(x.dtype) if formula.rounds else normed
    return ((weight.to(normed.dtype) + formula.offset) * normed).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation in torch of x [rows, heads, length, d]; for the other arguments see `Rotate`."""
    r = cos.shape[-1]
    turned, rest = x[..., :r], x[..., r:]
    half = torch.cat((-turned[..., r // 2 :], turned[..., : r // 2]), dim=-1)
    return torch.cat((turned * cos[:, None] + half * sin[:, None], rest), dim=-1)


def is_gated_mlp(module: Any) -> bool:
    """Whether a module computes down(silu(gate(x)) * up(x))."""
    if not {"gate_proj", "up_proj", "down_proj"} <= module._modules.keys() <= _MLP or module._parameters:
        return False
    twin = _stubbed(module, gate_proj=lambda x: x * 1.5, up_proj=lambda x: x - 0.3, down_proj=lambda x: x * 0.7)
    x = _drawn(8, 64)
    return _alike(lambda: type(module).forward(twin, x), lambda: F.silu(x * 1.5) * (x - 0.3) * 0.7)


def is_rotation(function: Any) -> bool:
    """Whether a function rotates as `rotated` does: all columns, and if it takes fewer angles, the first of them."""
    q, k, (cos, sin) = _drawn(1, 2, 16, 8), _drawn(1, 1, 16, 8, phase=1.0), _drawn(2, 1, 16, 8, phase=2.0)

    def right(r: int) -> bool:
        c, s = cos[..., :r], sin[..., :r]
        return _alike(lambda: function(q, k, c, s), lambda: [rotated(x, c, s) for x in (q, k)])

    try:
        function(q, k, cos[..., :4], sin[..., :4])
    except Exception:  # fewer angles do not fit, or none do
        return right(8)
    return right(8) and right(4)


def is_residual_layer(layer: Any) -> bool:
    """Whether a module computes what `_layer` does: attention and MLP, each with a norm before and a residual."""
    if layer._modules.keys() != _LAYER or layer._parameters or "forward" in layer.__dict__:
        return False
    calls = []

    def attention(hidden_states: Tensor, **more: Any) -> tuple[Tensor, None]:
        calls.append(more)
        return torch.sin(hidden_states), None

    def norm(x: Tensor, *residual: Tensor | None) -> Any:
        total = x if not residual or residual[0] is None else residual[0] + x
        return (total, total * 1.5 + 0.1) if residual else total * 1.5 + 0.1

    twin = _stubbed(layer, input_layernorm=norm, post_attention_layernorm=norm, self_attn=attention, mlp=torch.cos)
    x, keywords = _drawn(1, 8, 64), {name: object() for name in ("position_embeddings", "position_ids", "batch")}
    keywords |= {"attention_mask": None, "use_cache": False}
    if not _alike(lambda: type(layer).forward(twin, x, **keywords), lambda: _layer(twin, x, **keywords)):
        return False
    own, ours = calls
    return all(ours.get(name) is value for name, value in own.items())


# Whether a kernel and its gradient are right on a device.


def _agrees(found: Callable[..., Any], expected: Callable[..., Any], *inputs: Tensor) -> bool:
    """Whether a kernel agrees, gradients included, with a function that is given the inputs in float64."""
    # This may run while a forward is checkpointed or graphs are off.
    apart = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    results = []
    with torch.inference_mode(False), torch.enable_grad(), apart:
        for function, dtype in ((found, inputs[0].dtype), (expected, torch.float64)):
            leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
            out = torch.cat([part.flatten() for part in function(*leaves)])
            # The same numbers for both, and of no order, since sums that cancel out are off by more than roundings.
            weights = torch.arange(len(out), dtype=torch.float64).square().sin().to(out.device, inputs[0].dtype)
            results.append([out.detach(), *torch.autograd.grad((out * weights.to(dtype)).sum(), leaves)])
    most = _TOLERANCE * torch.finfo(inputs[0].dtype).eps
    return all(float((a.double() - b).norm() / b.norm()) < most for a, b in zip(*results, strict=True))


def _norm_agrees(device: torch.device, dtype: torch.dtype, size: int, formula: Any) -> bool:
    x, residual = (_drawn(40, size, dtype=dtype, phase=phase).to(device) for phase in (0.0, 1.0))
    weight = _drawn(size, dtype=dtype, phase=2.0).to(device)
    exact = formula._replace(rounds=False)

    def expected(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x + residual, rms_norm(x + residual, weight, exact)

    return _agrees(lambda x, r, w: gpu.norm.AddNorm.apply(x, r, w, formula), expected, x, residual, weight)


def _gate_agrees(device: torch.device, dtype: torch.dtype) -> bool:
    gate, up = (_drawn(7, 500, dtype=dtype, phase=phase).to(device) for phase in (0.0, 1.0))
    return _agrees(lambda g, u: [gpu.gate.SiluTimes.apply(g, u)], lambda g, u: [F.silu(g) * u], gate, up)


def _rotation_agrees(device: torch.device, dtype: torch.dtype) -> bool:
    q, k = (_drawn(1, 9, heads, 64, dtype=dtype).transpose(1, 2).to(device) for heads in (3, 1))
    angle = torch.arange(9 * 24).view(1, 9, 24).to(device)
    angle = torch.cat([angle, angle], dim=-1)

    def turned(rotate: Any, q: Tensor, k: Tensor) -> Any:
        # The angles are rounded to the type of the kernel in both.
        return rotate(q, k, *(table.to(dtype).to(q.dtype) for table in (angle.cos(), angle.sin())))

    def expected(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        return [rotated(x, cos, sin) for x in (q, k)]

    kernel, definition = (functools.partial(turned, way) for way in (gpu.rotation.Rotate.apply, expected))
    return _agrees(kernel, definition, q, k)
