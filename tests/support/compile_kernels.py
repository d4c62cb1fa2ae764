"""Compiles every Triton kernel to machine code for a GPU, without one: python compile_kernels.py ARCHITECTURE [once]

With `once`, only the first launch of each kernel is compiled. Prints a line for each: the name, the shared memory that
a program takes, and what a thread keeps outside registers, in bytes. To try another version of Triton, install it into
a folder of its own, and put that first:

    pip install --no-deps --target /tmp/triton-3.6 triton==3.6.0
    PYTHONPATH=/tmp/triton-3.6:. python tests/support/compile_kernels.py 90
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hybrid_grpo.model.kernels import gpu

CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
TYPES = {
    **{torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64"},
    **{torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8", torch.int8: "*i8"},
}


def type_of(argument: Any) -> str:
    if isinstance(argument, Tensor):
        return TYPES[argument.dtype]
    if isinstance(argument, float):
        return "fp32"
    return "i64" if abs(argument) >= 1 << 31 else "i32"


def launches() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """What the package's functions launch for a decode step of Qwen2.5-1.5B and the head, with and without options."""
    seen = []
    for module in (gpu.attention, gpu.gate, gpu.norm, gpu.products, gpu.rotation, gpu.sampling, gpu.softmax):
        module.launch = lambda kernel, grid, *given, **options: seen.append((kernel, given, options))
    half, n, d = {"dtype": torch.bfloat16, "device": "meta"}, 4, 128
    x, weight, rows = torch.empty(n, 1536, **half), torch.empty(1536, **half), torch.empty(n, device="meta")
    gpu.norm.rms_norm(x, weight, 1e-6, x, rows)
    gate_up = torch.empty(n, 2 * 8960, **half)
    gpu.gate.silu_times(*gate_up.split(8960, dim=1), torch.empty(n, 8960, **half))
    numbers, table = torch.empty(n, dtype=torch.int64, device="meta"), torch.empty(n, 3, dtype=torch.int32)
    keys, head_weight = torch.empty(9, 256, 2, d, **half), torch.empty(d, **half)
    qkv, rope = torch.empty(n, 16 * d, **half), torch.empty(768, 2 * d, **half)
    for norms in (None, (head_weight, head_weight)):
        turn, query = gpu.attention.Turn(qkv, rope, numbers, norms, 1e-6), qkv[:, : 12 * d].view(n, 12, d)
        gpu.attention.paged_attention(query, keys, keys, table, numbers, 0.1, 0, 0.0, None, {}, turn=turn)
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.empty(n, 151_936, dtype=dtype, device="meta")
        gpu.sampling.sample(logits, numbers, numbers, 1.25, 0, 1 << 23, 0, False, False)
        gpu.sampling.sample(logits, numbers, numbers, 1.25, 50, 1 << 22, 1 << 38, False, True)
        sums = (*(rows.double() for _ in range(3)), rows)
        gpu.softmax.add(sums, logits[:, :8000], numbers, 0.9, 8000)
        for dentropy in (None, rows):
            gpu.softmax.gradient(logits, logits[:, :8000], rows, numbers, rows, rows, dentropy, 0.9, 8000)
    for heads, kv, width, value, rows, options in (
        (12, 2, 128, 128, 256, {}),  # Qwen2.5-1.5B
        (12, 2, 128, 128, 1, {}),
        (32, 8, 128, 128, 8, {"window": 4096}),  # Mistral
        (8, 4, 256, 256, 64, {"window": 4096, "softcap": 50.0}),  # Gemma 2
        (64, 8, 64, 64, 8, {"window": 128, "sinks": weight}),  # gpt-oss
        (32, 32, 96, 96, 64, {}),  # Phi-3
        (128, 1, 576, 512, 8, {}),  # DeepSeek-V3, latents
        (16, 16, 192, 128, 8, {}),
        (12, 2, 128, 128, 8, {"longest": 8, "begins": table[0]}),
    ):
        for dtype in (torch.bfloat16, torch.float32):
            keys = torch.empty(9, 32, kv, width, dtype=dtype, device="meta")
            values = keys[..., :value] if kv == 1 else torch.empty(9, 32, kv, value, dtype=dtype, device="meta")
            query = torch.empty(rows, heads, width, dtype=dtype, device="meta")
            pages = torch.empty(rows, 32, dtype=torch.int32, device="meta")
            given = {"scale": width**-0.5, "window": 0, "softcap": 0.0, "sinks": None, **options}
            scratch = {}
            gpu.attention.paged_attention(
                query, keys, values, pages, numbers[:1].expand(rows), **given, scratch=scratch
            )
    products()
    return seen + states() + layers()


def products() -> None:
    """What a decode step of Qwen2.5-1.5B multiplies; then weights in eight bits, adapters, and weights in four."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    integers, numbers, matrix = empty(1, dtype=torch.uint8), empty(1, dtype=torch.float32), gpu.products.Matrix
    four_bits = gpu.products.Packed(numbers, integers, numbers, numbers, numbers)
    for n, rank in ((1, 16), (16, 64), (32, 128), (64, 64), (256, 16)):
        x, out, inner = empty(n, 1536), empty(n, 2048), empty(n, 8960)
        weight, adapter = empty(2048, 1536), (empty(rank, 1536), empty(2048, rank), 2.0)
        gpu.products.product(x, matrix(weight, out[0]), out, {}, norm=x[0])
        gpu.products.product(inner, matrix(empty(1536, 8960)), x, {}, add=True)
        gpu.products.product(x, matrix(empty(2 * 8960, 1536)), inner, {}, norm=x[0], gate=True)
        eight_bits = matrix(empty(2 * 8960, 1536, dtype=torch.int8), scale=numbers)
        gpu.products.product(x, eight_bits, inner, {}, norm=x[0], gate=True)
        gpu.products.product(x, matrix(weight, None, None, adapter), out, {})
        gpu.products.product(x, matrix(integers, None, four_bits, adapter), out, {}, norm=x[0])


def states() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """What a decode step launches in layers with a state of Qwen3.5, Kimi Linear, Nemotron-H and Jamba."""
    seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    gpu.states.launch = lambda kernel, grid, *given, **options: seen.append((kernel, given, options))
    half, single, n = {"dtype": torch.bfloat16, "device": "meta"}, {"dtype": torch.float32, "device": "meta"}, 8
    for channels, bias in ((8192, None), (10_240, torch.empty(10_240, **half))):
        window, weight = torch.empty(n, channels, 4, **half), torch.empty(channels, 4, **half)
        gpu.states.causal_convolution(window[..., 0].contiguous(), window, weight, bias, silu=True)
    for key_heads, by_channel in ((16, False), (32, True)):
        query, key = (torch.empty(n, key_heads, 128, **half) for _ in range(2))
        value, beta = torch.empty(n, 32, 128, **half), torch.empty(n, 32, **half)
        log_decay, state = torch.empty(n, 32, *[128] * by_channel, **single), torch.empty(n, 32, 128, 128, **single)
        gpu.states.delta_rule(query, key, value, log_decay, beta, state, unit=True)
    x, (b, c), a = torch.empty(n, 128, 64, **half), torch.empty(2, n, 8, 128, **half), torch.empty(128, **single)
    gpu.states.selective_update(torch.empty(n, 128, 64, 128, **single), x, x, a, b, c, a)
    state, x, b = torch.empty(n, 1, 8192, 16, **single), torch.empty(n, 1, 8192, **half), torch.empty(n, 1, 16, **half)
    gpu.states.selective_update(state, x, x, state[0], b, b, state[0, :, :, 0].contiguous())
    return seen


def layers() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """What the layers of training launch, forward and backward, for models of several sizes."""
    seen = []
    for module in (gpu.gate, gpu.norm, gpu.rotation):
        module.launch = lambda kernel, grid, *given, **options: seen.append((kernel, given, options))

    def empty(*shape: int, trains: bool = True) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta", requires_grad=trains)

    llama, gemma = gpu.norm.Formula(1e-6), gpu.norm.Formula(1e-6, 1.0, False)
    # Heads, Qwen2.5-1.5B, 7B with frozen norms, and the widest.
    for size, formula in ((128, llama), (1536, llama), (3584, gemma), (gpu.norm.WIDEST, llama)):
        x, weight = empty(1, 64, size), empty(size, trains=size != 3584)
        total, out = gpu.norm.AddNorm.apply(x, x.detach(), weight, formula)
        (total.sum() + out.sum()).backward()
        gpu.norm.AddNorm.apply(x, None, weight, formula)[1].sum().backward()
    gpu.gate.SiluTimes.apply(empty(64, 8960), empty(64, 8960)).sum().backward()
    for heads, kv, d, r in ((12, 2, 128, 128), (16, 2, 256, 64), (128, 128, 128, 128)):
        q, k = (empty(1, 64, count, d).transpose(1, 2) for count in (heads, kv))
        cos = empty(1, 64, r, trains=False)
        out = gpu.rotation.Rotate.apply(q, k, cos, cos)
        (out[0].sum() + out[1].sum()).backward()
    return seen


def stack(cubin: bytes) -> int:
    """The bytes of a thread's stack and local memory, which a kernel takes if its registers do not suffice."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        used = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", used)))


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    every, first = launches(), {}
    for launch in every:
        first.setdefault(launch[0].__name__, launch)
    for kernel, given, options in list(first.values()) if "once" in sys.argv else every:
        types = [type_of(argument) for argument in given]
        constants = {name: value for name, value in options.items() if name.isupper()}
        named = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(constants)], strict=True))
        # As a launch finds out: memory begins at a multiple of 16 bytes, and most sizes are multiples of 16.
        even = [
            isinstance(argument, Tensor) or (isinstance(argument, int) and argument % 16 == 0) for argument in given
        ]
        attributes = {(index,): [["tt.divisibility", 16]] for index, is_even in enumerate(even) if is_even}
        source = ASTSource(fn=kernel, signature=named, constexprs=constants, attrs=attributes)
        rest = {name: value for name, value in options.items() if name not in constants}
        compiled = triton.compile(source, target=target, options=rest)
        assert compiled.asm["cubin"]
        print(kernel.__name__, compiled.metadata.shared, stack(compiled.asm["cubin"]))


if __name__ == "__main__":
    main()
