"""Where Triton's kernels are tested: on a GPU, or interpreted on a CPU."""

import os

import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def multiply_bfloat16() -> None:
    """Let Triton's interpreter multiply bfloat16, of which it would multiply the bits as integers."""
    dot = InterpreterBuilder.create_dot

    def of_floats(self, a, b, *rest):
        a, b = (self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    InterpreterBuilder.create_dot = of_floats


def patch_once() -> None:
    """Let Triton's interpreter replace the functions of its language once in a kernel. It would look through all of
    them again in every function that a kernel calls, which takes a quarter of its time."""
    patch = interpreter._patch_lang

    def where_needed(fn):
        languages = [tl, *(value for value in fn.__globals__.values() if value is tl.core)]
        return patch(fn) if any(tl.core.is_builtin(language.load) for language in languages) else None

    interpreter._patch_lang = where_needed


multiply_bfloat16()
patch_once()


def cases(few: int = 50) -> range:
    """Random cases of a kernel: 300 on a GPU, and `few` interpreted, unless KERNEL_CASES says how many."""
    return range(int(os.environ.get("KERNEL_CASES", 300 if DEVICE == "cuda" else few)))


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to a type. Triton's interpreter cuts off bits of bfloat16 instead."""
    cut_off = DEVICE == "cpu" and dtype == torch.bfloat16
    return torch.finfo(dtype).eps / (1 if cut_off else 2)


def assert_within(out, expected, roundings, size):
    """`size`: what was rounded on the way, which can be larger than the result."""
    kind = torch.finfo(out.dtype)
    assert out.shape == expected.shape
    # In float32 the sums of a row are rounded too. Below its smallest normal number a type has equal steps.
    bound = roundings * (5 if out.dtype == torch.float32 else 1) * rounding(out.dtype) * size
    gap = (out.double() - expected).abs()
    assert (gap <= bound + roundings * kind.smallest_normal * kind.eps).all(), float((gap / bound).max())


def random(generator, dtype, *shape, scale=1.0):
    return (scale * torch.randn(*shape, generator=generator)).to(DEVICE, dtype)
