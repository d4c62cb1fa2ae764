"""Kernels launched and bytes moved by a decode step and the LM head on a GPU, counted without one.

    python benchmarks/budget.py --json FILE

Both run on fake tensors, which have shapes and types but no data, as they would on a GPU: in bfloat16, with
variable-length attention and the Triton kernels. Every torch operation that reads or writes memory counts as one
kernel, with the bytes of its arguments and results. A Triton kernel counts with the bytes that one program loads and
stores in Triton's interpreter, repeated loads included, times the number of programs. Counted are

    decode_kernels               a decode step of Qwen2.5-1.5B with 256 sequences, sampling included
    tail_kernels                 the same with one sequence, whose entries several programs share
    switch_launches              copies and gathers of weights before a rollout, on 8 ranks
    sampler_gb, sampler_top_p_gb sampling 256 tokens out of a vocabulary of 151,936, without filters and with top-p 0.95
    head_launches, head_gb       log-probabilities of 16,384 tokens and their gradient, without the matrix products
    delta_gb                     a token of 256 sequences through the recurrence of a Gated DeltaNet as wide as that of
                                 Qwen3.5; delta_torch_*: the same by transformers' function
    training_elementwise_gb_*    the layers of Qwen2.5 in a forward and backward of 16,384 tokens with checkpointing,
                                 without the matrix products and the kernel of attention
"""

import math
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from machine import parser_of, save
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config

os.environ["TRITON_INTERPRET"] = "1"

from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule
from triton.runtime import interpreter

from hybrid_grpo.data.packing import pack
from hybrid_grpo.generation import Sampling, paged_attention
from hybrid_grpo.generation.cache import Geometry, PagedCache
from hybrid_grpo.generation.decoder import Decoder
from hybrid_grpo.model import attention, gathered_weights, ragged_attention
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.kernels import build, gpu
from hybrid_grpo.model.kernels.gpu import launcher
from hybrid_grpo.model.kernels.states import recurrent_delta_rule
from hybrid_grpo.model.layers import fuse
from hybrid_grpo.model.logprobs import token_logprobs
from hybrid_grpo.model.ragged_attention import Options
from hybrid_grpo.model.sidecars import TokenRow

ROWS, PAGES_OF_A_SEQUENCE, RANKS = 256, 32, 8
TOKENS, HIDDEN, VOCABULARY, LAYERS = 16384, 1536, 151936, 28
SHAPES = {
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4},
}
"""Qwen2.5."""
PRODUCTS = {"mm", "addmm", "bmm", "linear", "matmul", "addmm_"}
_FREE = {
    *("view", "_unsafe_view", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "detach", "alias"),
    *("permute", "as_strided", "split", "split_with_sizes", "chunk", "unbind", "reshape", "lift_fresh", "empty"),
    *("empty_like", "new_empty", "device"),
}
"""Operations that only return a view, or uninitialized memory."""


class Count(TorchDispatchMode):
    """Kernels and bytes of every operation, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name not in _FREE:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            self.kernels[name] += 1
            self.bytes[name] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return out

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Stands in for `launcher.launch`."""
        self.kernels[kernel.__name__] += 1
        self.bytes[kernel.__name__] += math.prod(grid) * bytes_of_a_program(kernel, arguments, options)


_measured: dict[Any, int] = {}


def bytes_of_a_program(kernel: Any, arguments: Any, options: Any) -> int:
    """Bytes that the first program of a kernel loads and stores, on tensors of zeros of the arguments' shapes."""
    shapes = tuple((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in arguments)
    key = (kernel, shapes, *sorted(options.items()))
    if key not in _measured:
        with _disable_current_modes():
            real = [_zeros(a) if isinstance(a, Tensor) else a for a in arguments]
            memory, interpreter._interpreter = interpreter._interpreter, _Memory(interpreter._interpreter)
            try:
                kernel[(1,)](*real, **options)
                _measured[key] = interpreter._interpreter.bytes
            finally:
                interpreter._interpreter = memory
    return _measured[key]


def _zeros(like: Tensor) -> Tensor:
    """Zeros in memory that is taken where it is used: a program sees little of gigabytes, which torch would write."""
    return torch.from_numpy(np.zeros(like.numel() * like.element_size(), np.uint8)).view(like.dtype).view(like.shape)


class _Memory:
    """The interpreter's memory, counting the bytes that pass."""

    def __init__(self, memory: Any) -> None:
        self._memory, self.bytes = memory, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def load(self, at: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.bytes += int(mask.sum()) * np.dtype(dtype).itemsize
        return self._memory.load(at, mask, other, dtype)

    def store(self, at: Any, value: Any, mask: Any) -> Any:
        self.bytes += int(mask.sum()) * value.itemsize
        return self._memory.store(at, value, mask)


@contextmanager
def counted() -> Iterator[Count]:
    """Counts the kernels launched inside the context."""
    modules = [module for name in gpu.__all__ if hasattr(module := getattr(gpu, name), "launch")]
    with Count() as count:
        for module in modules:
            module.launch = count.launch
        try:
            yield count
        finally:
            for module in modules:
                module.launch = launcher.launch


def qwen(fake: FakeTensorMode) -> Any:
    """Qwen2.5-1.5B in bfloat16 on fake tensors."""
    config = Qwen2Config(**SHAPES["1.5b"], vocab_size=VOCABULARY, num_hidden_layers=LAYERS, tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION)
    with fake:
        model.to_empty(device="cpu")
    model.tie_weights()
    return model.eval()


def switched(model: Any) -> tuple[Any, int]:
    """The model with its weights as ranks gather them before a rollout, and the launches that this takes."""
    gathers = []
    for parameter in model.parameters():
        parameter.ds_numel, parameter.ds_shape = parameter.numel(), parameter.shape
        parameter.ds_tensor = torch.empty(-(-parameter.numel() // RANKS), dtype=parameter.dtype)
        parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
    gathered_weights.world_size = lambda: RANKS
    torch.distributed.all_gather_into_tensor = lambda out, shard: gathers.append(out)
    whole = gathered_weights.meta_copy(model, ATTENTION).eval()
    made = gathered_weights.View(model, whole, True, torch.device("cpu"), neighbors=True)
    with counted() as count:
        made.gather()
    return whole, len(gathers) + count.kernels.total()


def decode_step(model: Any, sampling: Sampling, rows: int) -> tuple[int, Count]:
    """The kernels of a captured step, and of it the choice of tokens."""
    geometry = Geometry((((2, 128), (2, 128)),) * LAYERS, torch.bfloat16, (Options(128**-0.5),) * LAYERS)
    cache = PagedCache(geometry, rows * PAGES_OF_A_SEQUENCE + 2, paged_attention.PAGE, torch.device("cpu"), rows)
    decoder = Decoder(model, cache, sampling, rows, PAGES_OF_A_SEQUENCE, capture=lambda step: (lambda: None, step()))
    with torch.inference_mode():
        # The first step takes the memory.
        decoder._choose(*decoder._forward_to_logits(rows), rows)
        with counted() as forward:
            (logits_nV,) = decoder._forward_to_logits(rows)
        with counted() as choice:
            decoder._choose(logits_nV, rows)
    return forward.kernels.total() + choice.kernels.total(), choice


def head() -> Count:
    """Log-probabilities of given tokens, and the gradient of their sum."""
    hidden = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with counted() as count:
        logp_N, _ = token_logprobs(hidden, weight, None, torch.empty(TOKENS, dtype=torch.int64))
        logp_N.sum().backward()
    return count


def delta() -> tuple[Count, Count]:
    """A token of 256 sequences through the gated delta rule of a layer of Qwen3.5: by the kernel, and by transformers'
    function, whose result is then stored."""
    half, heads, key_heads, d = {"dtype": torch.bfloat16}, 32, 16, 128
    query, key = (torch.empty(ROWS, 1, key_heads, d, **half) for _ in range(2))
    value, log_decay = torch.empty(ROWS, 1, heads, d, **half), torch.empty(ROWS, 1, heads)
    given = query, key, value, log_decay, torch.empty(ROWS, 1, heads, **half)
    state = torch.empty(ROWS, heads, d, d)
    with torch.inference_mode(), counted() as kernel:
        assert recurrent_delta_rule(*given, state, unit=True) is not None
    with torch.inference_mode(), counted() as plain:
        _, after = torch_recurrent_gated_delta_rule(
            *given, state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        state.copy_(after)
    return kernel, plain


def training(size: str) -> int:
    """The bytes that the layers of a model move; two layers say what one adds."""
    one, two = (moved(size, layers) for layers in (1, 2))
    return one + (LAYERS - 1) * (two - one)


def moved(size: str, layers: int) -> int:
    """The bytes moved in the forward and backward of a packed micro-batch of 32 rows with checkpointing, without the
    matrix products, the kernel of attention, and the head."""
    config = Qwen2Config(**SHAPES[size], vocab_size=VOCABULARY, num_hidden_layers=layers, tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION).base_model
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model.to_empty(device="cpu")
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        # The engine takes gradients as soon as they are there.
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    fuse(model, None)
    rows = [[1] * 256 for _ in range(TOKENS // 512)]
    [micro] = pack(TokenRow.of(rows, [[*row, 1] for row in rows]), TOKENS, torch.device("cpu"), share="off")
    assert micro.input_ids_bS.numel() == TOKENS
    given = {"input_ids": micro.input_ids_bS, "position_ids": micro.position_ids, "batch": micro.segments}
    with fake, counted() as count:
        model(**given, use_cache=False).last_hidden_state.sum().backward()
    return sum(n for name, n in count.bytes.items() if name not in PRODUCTS and "varlen" not in name)


def measure() -> dict[str, float]:
    """All numbers of the budget."""
    # As on a GPU: no C kernels, but the variable-length kernel.
    build.load = lambda: None
    launcher.on_gpu = lambda _: True
    gpu.tried = gpu.proven = lambda *_, **__: True
    attention.on_gpu = ragged_attention.on_gpu = paged_attention.on_gpu = lambda _: True
    ragged_attention.flash_attn_varlen_func = None
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = qwen(fake)
    with fake:
        whole, launches = switched(model)
        step, choice = decode_step(whole, Sampling(512), ROWS)
        tail, _ = decode_step(whole, Sampling(512), 1)
        _, filtered = decode_step(whole, Sampling(512, top_p=0.95), ROWS)
        given = head()
        by_kernel, by_torch = delta()
    return {
        "decode_kernels": step, "tail_kernels": tail, "switch_launches": launches,
        "sampler_gb": choice.bytes.total() / 1e9, "sampler_top_p_gb": filtered.bytes.total() / 1e9,
        "head_launches": sum(n for name, n in given.kernels.items() if name not in PRODUCTS),
        "head_gb": sum(n for name, n in given.bytes.items() if name not in PRODUCTS) / 1e9,
        "delta_gb": by_kernel.bytes.total() / 1e9, "delta_torch_kernels": by_torch.kernels.total(),
        "delta_torch_gb": by_torch.bytes.total() / 1e9,
        **{f"training_elementwise_gb_{size}": training(size) / 1e9 for size in SHAPES},
    }  # fmt: skip


def main() -> None:
    file, numbers = parser_of(__doc__).parse_args().json, measure()
    for name, value in numbers.items():
        print(f"{name:28} {value:,.2f}" if isinstance(value, float) else f"{name:28} {value:,}")
    save(file, numbers)


if __name__ == "__main__":
    main()
