"""Compares the kernels of a GPU with their definitions in torch, for gpu_profile.py."""

import copy
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gpu_bench import Bench, Found, first_line
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid_grpo.commands.description import describe
from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.generation import Sampling
from hybrid_grpo.generation.cache import Geometry, PagedCache, Rows
from hybrid_grpo.generation.fused_step import fused_step
from hybrid_grpo.generation.paged_attention import PAGE, DecodeStep, decode_step, has_kernel
from hybrid_grpo.generation.sampler import Sampler
from hybrid_grpo.model.attention import ATTENTION, Segments
from hybrid_grpo.model.logprobs import LogprobModel, token_logprobs
from hybrid_grpo.model.ragged_attention import Options, attend
from hybrid_grpo.model.upload import Selection

_TOKENS = 96
"""Different tokens of a micro-batch."""


def checks(bench: Bench, found: Found) -> None:
    dtype = str(bench.sizes.dtype).removeprefix("torch.")
    with TemporaryDirectory() as folder:
        bench.config.save_pretrained(folder)
        found["attention"] = describe(PolicyConfig(model=folder, dtype=dtype), bench.device, paged=True)
    for name, check in _CHECKS.items():
        try:
            found[name] = check(bench)
        except Exception as error:  # the other checks still run
            found[name] = f"FAILED: {first_line(error)}"


def _gap(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to that of what is expected."""
    return float((found.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


def _drawn(bench: Bench, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator(bench.device).manual_seed(0)
    drawn = (torch.randn(shape, generator=generator, device=bench.device) for shape in shapes)
    return [tensor.to(bench.sizes.dtype) for tensor in drawn]


def _heads(bench: Bench) -> tuple[int, int, int]:
    heads = bench.config.num_attention_heads
    return heads, bench.config.num_key_value_heads, bench.config.hidden_size // heads


def _layer_step(bench: Bench, rows: int, context: int) -> tuple[DecodeStep, Tensor, Tensor, Tensor, Options, bool]:
    """A decode step of one layer after `context` entries, with its query, keys and values, and whether a kernel reads
    them."""
    heads, kv, d = _heads(bench)
    width = -(-context // PAGE)
    pools = [torch.randn(rows * width, PAGE, kv, d, device=bench.device).to(bench.sizes.dtype) for _ in range(2)]
    cache = PagedCache(Geometry((((kv, d), (kv, d)),), bench.sizes.dtype), 1, PAGE, bench.device)
    table = torch.arange(rows * width, dtype=torch.int32, device=bench.device).view(rows, width)
    position = torch.full((rows,), context - 1, device=bench.device)
    step = DecodeStep(cache, Rows(position, table, position, width))
    query, options = _drawn(bench, (rows, heads, 1, d))[0], Options(d**-0.5)
    seen = has_kernel(*cache.place, *pools, heads // kv, options)
    return step, query, *pools, options, seen


@torch.inference_mode()
def _decoding_attention(bench: Bench) -> dict[str, Any]:
    context = bench.sizes.contexts[1]
    step, query, keys, values, options, seen = _layer_step(bench, 2, context)
    expected = step.on_copies(query.float(), keys.float(), values.float(), options)[:, 0]
    gaps = {"used": seen, "entries": context}
    for most in (1, None):
        out = step.by_kernel(query, keys, values, options, budget=most)
        gaps[f"gap, {f'{most} split' if most else 'splits by default'}"] = _gap(out, expected)
    return gaps


def _training_attention(bench: Bench) -> dict[str, float]:
    """The output and the gradients of a prompt with two completions, one of which is continued."""
    heads, kv, d = _heads(bench)
    batch = Segments.of_tree([(0, 40), (40, 20), (60, 30), (90, 30)], [-1, 0, 0, 1], bench.device)
    tensors = _drawn(bench, (1, heads, 120, d), (1, kv, 120, d), (1, kv, 120, d))
    weight, options = torch.linspace(-1, 1, d, device=bench.device), Options(d**-0.5)

    def results(segments: Any, dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (tensor.to(dtype).requires_grad_() for tensor in tensors)
        out = segments(q, k, v)
        return [out, *torch.autograd.grad((out * weight).sum(), (q, k, v))]

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        number = torch.tensor([0] * 40 + [1] * 20 + [2] * 30 + [3] * 30, device=bench.device)
        continues = (number[:, None] == 3) & (number == 1)
        allowed = ((number[:, None] == number) | (number == 0) | continues).tril()
        return attend(q, k, v, allowed, options).transpose(1, 2)

    pair = results(lambda *qkv: batch.attend(*qkv, options), bench.sizes.dtype), results(exact, torch.float32)
    return {name: _gap(*both) for name, both in zip(("out", "dq", "dk", "dv"), zip(*pair, strict=True), strict=True)}


def micro_batch(device: torch.device, prompt: int, count: int, length: int) -> tuple[Any, ...]:
    """The first arguments of `LogprobModel`, for a prompt and `count` completions, which share it."""
    begins = [prompt + i * length for i in range(count)]
    own = [(0, prompt), *((begin, length) for begin in begins)]
    before = [np.concatenate([[prompt - 1], np.arange(begin, begin + length - 1)]) for begin in begins]
    position = torch.cat([torch.arange(prompt), torch.arange(prompt, prompt + length).repeat(count)])[None].to(device)
    ids = torch.arange(prompt + count * length, device=device)[None] % _TOKENS
    source, segments = Selection(np.concatenate(before), device), Segments.of_tree(own, [-1, *[0] * count], device)
    return ids, position, source, ids[0, prompt:], segments


def _training_layers(bench: Bench) -> dict[str, float]:
    """Forward and backward of a model with two layers, against the same in float32 on the CPU."""
    config = copy.deepcopy(bench.config)
    config.num_hidden_layers, config.vocab_size, config.layer_types = 2, _TOKENS, config.layer_types[:2]
    torch.manual_seed(0)
    exact = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION)
    used = copy.deepcopy(exact).to(bench.device)
    for p in used.parameters():  # not the frequencies of rotations, which stay exact
        p.data = p.data.to(bench.sizes.dtype)
    logp, grads = [], []
    for made, device in ((used, bench.device), (exact, torch.device("cpu"))):
        logp_N, _ = LogprobModel(made).train()(*micro_batch(device, 16, 3, 16), (), 1.0)
        logp_N.mean().backward()
        logp.append(logp_N.detach().cpu())
        grads.append(torch.cat([p.grad.flatten().cpu().float() for p in made.parameters()]))
    return {"largest_nats": float((logp[0] - logp[1]).abs().max()), "gradient": _gap(*grads)}


@torch.inference_mode()
def _step(bench: Bench) -> dict[str, Any]:
    """The step of Triton kernels against transformers' forward, on the logits of three sequences."""
    cache, other = (PagedCache(bench.geometry, 4, PAGE, bench.device, 3) for _ in range(2))
    step = fused_step(bench.view, cache)
    if step is None:
        return {"fused": False}
    table = torch.arange(1, 4, dtype=torch.int32, device=bench.device)[:, None]
    token, position = (torch.tensor(x, device=bench.device) for x in ([3, 5, 7], [0, 0, 0]))
    rows = Rows(token, table, position, 1)
    gaps: dict[str, Any] = {"fused": True}
    for name, most_rows in (("by the kernel", 3), ("by torch", 0)):
        step.most_rows = most_rows
        gaps[f"gap, products {name}"] = _gap(step(rows), decode_step(bench.view, other, rows))
    return gaps


def _head(bench: Bench) -> dict[str, float]:
    """Log-probabilities, in nats, and their gradient."""
    hidden, weight = _drawn(bench, (64, bench.config.hidden_size), (bench.config.vocab_size, bench.config.hidden_size))
    hidden, weight = hidden.requires_grad_(), weight * bench.config.hidden_size**-0.5
    target = torch.arange(64, device=bench.device)
    logp, _ = token_logprobs(hidden, weight, None, target)
    (found,) = torch.autograd.grad(logp.sum(), hidden)
    exact = hidden.detach().float().requires_grad_()
    expected = (exact @ weight.float().T).log_softmax(-1).gather(1, target[:, None])[:, 0]
    (grad,) = torch.autograd.grad(expected.sum(), exact)
    return {"largest_nats": float((logp - expected).detach().abs().max()), "gradient": _gap(found, grad)}


@torch.inference_mode()
def _sampling(bench: Bench) -> dict[str, float]:
    (logits,) = _drawn(bench, (8, bench.config.vocab_size))
    key, counter = torch.arange(8, device=bench.device), torch.zeros(8, dtype=torch.int64, device=bench.device)
    token, logp, *_ = Sampler(Sampling(1), bench.device)(logits, key, counter)
    expected = logits.float().log_softmax(-1).gather(1, token[:, None])[:, 0]
    return {"largest_nats": float((logp - expected).abs().max())}


_CHECKS: dict[str, Callable[[Bench], Any]] = {
    "training_attention": _training_attention, "training_layers": _training_layers,
    "decoding_attention": _decoding_attention, "decode_step": _step, "head": _head, "sampling": _sampling,
}  # fmt: skip
