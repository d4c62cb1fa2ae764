"""What the parts of gpu_profile.py share: the device, the sizes, a model of made weights, and its decoder."""

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from hybrid_grpo.distributed.hardware import Hardware, of_device
from hybrid_grpo.generation import Sampling, graphs
from hybrid_grpo.generation.cache import Geometry, PagedCache, free_bytes
from hybrid_grpo.generation.decoder import Decoder, capture_on
from hybrid_grpo.generation.loop import _prepared
from hybrid_grpo.generation.paged_attention import PAGE
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.gathered_weights import View, meta_copy
from hybrid_grpo.model.kernels import build

Found = dict[str, Any]
_CACHE_SHARE = 0.9
"""Fraction of the free memory that the cache may take, less what prefills and graphs take."""


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    model: dict[str, int]
    dtype: torch.dtype
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    profiled: tuple[tuple[int, int], ...]
    """(rows, context) of the steps whose kernels are listed."""
    prefills: tuple[tuple[int, int, int], ...]
    """(sequences, entries before, new tokens of each)."""
    micro_batch: tuple[int, int, int]
    """(tokens of the prompt, completions, tokens of each)."""
    peers: tuple[tuple[str, int, int, float], ...]
    """(model, tokens of a sequence, rank of adapters or 0, published tokens a second); no model means `model`."""


REAL = Sizes(
    {
        **{"vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
        **{"num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 1 << 17},
    },
    torch.bfloat16,
    (1, 8, 64, 256),
    (1024, 8192, 32_768),
    20,
    ((256, 1024), (8, 32_768)),
    ((16, 0, 1024), (2, 0, 8192), (64, 1024, 64), (64, 1024, 256), (60, 1024, 272)),
    (512, 31, 512),
    # prime-rl's trainer on an H100: FlashAttention 3, activations computed again, two sequences a step.
    (
        *(("Qwen3-0.6B", 16_384, 0, 11_896), ("Qwen3-0.6B", 65_536, 0, 10_147), ("Qwen3-0.6B", 16_384, 16, 13_342)),
        *(("Qwen3-0.6B", 65_536, 16, 9_967), ("Qwen3-4B", 16_384, 16, 6_229), ("Qwen3-4B", 65_536, 16, 4_164)),
    ),
)
_TOY = Sizes(
    {
        **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    },
    torch.float32, (1, 2), (20, 40), 2, ((2, 20),), ((2, 0, 12), (2, 20, 3)), (6, 3, 5),
    (("", 40, 0, 1.0), ("", 40, 2, 1.0)),
)  # fmt: skip


@dataclass
class Bench:
    """The device, and what the parts share."""

    sizes: Sizes
    device: torch.device
    new_capture: Callable[[], graphs.Capture | None]
    """Returns what captures into a memory pool of its own."""
    weights: Any = "merged"
    """See `View`."""

    def capture(self, step: graphs.Step) -> graphs.Replay:
        """Capture a step as a CUDA graph."""
        capture = self.new_capture()
        assert capture is not None
        return capture(step)[0]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], Any], repeats: int) -> float:
        """Median seconds of `work`, after one call that is not timed."""
        times = []
        for _ in range(1 + repeats):
            self.synchronize()
            start = time.perf_counter()
            work()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return median(times[1:])

    @cached_property
    def hardware(self) -> Hardware:
        return of_device(self.device, "bfloat16" if self.device.type == "cuda" else "float32")

    @cached_property
    def config(self) -> Any:
        return Qwen2Config(**self.sizes.model, tie_word_embeddings=True)

    def made(self, config: Any) -> Any:
        """A model of random weights."""
        torch.manual_seed(0)
        with torch.inference_mode(False), torch.device(self.device):
            return AutoModelForCausalLM.from_config(config, dtype=self.sizes.dtype, attn_implementation=ATTENTION)

    @cached_property
    def model(self) -> Any:
        """The model in training, its parameters one after the other in memory, as DeepSpeed lays them out."""
        made = self.made(self.config)
        with torch.inference_mode(False), torch.device(self.device):
            parameters = list(made.parameters())
            flat = torch.cat([p.data.flatten() for p in parameters])
            for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                p.data = part.view(p.shape)
        return made

    @cached_property
    def view(self) -> Any:
        """The same weights as they decode."""
        module = meta_copy(self.model, ATTENTION).eval()
        View(self.model, module, False, self.device, weights=self.weights).gather()
        return module

    @cached_property
    def geometry(self) -> Geometry:
        return _prepared(self.view)

    @cached_property
    def cache(self) -> PagedCache:
        """Pages for the most entries that are asked for, or as many as fit."""
        pages = [self.pages(rows, context) for rows in self.sizes.rows for context in self.sizes.contexts]
        prefill = max(n * new for n, _, new in self.sizes.prefills) * self.geometry.reading
        slots = max(self.sizes.rows)
        room = _CACHE_SHARE * free_bytes(self.device) - prefill - graphs.bytes_of(slots)
        count = int(room / (PAGE * self.geometry.token_bytes))
        cache = PagedCache(self.geometry, min(max(pages), count), PAGE, self.device, slots)
        for pool in (*cache.keys, *cache.values):
            pool.normal_()
        return cache

    def pages(self, rows: int, context: int) -> int:
        """Pages for `rows` sequences with as many entries and those of the steps, and page 0."""
        return rows * self.width(context) + 1

    def width(self, context: int) -> int:
        return -(-(context + 4 * self.sizes.steps + 8) // PAGE)

    @cached_property
    def decoder(self) -> Decoder:
        width = self.width(max(self.sizes.contexts))
        return Decoder(self.view, self.cache, Sampling(1), max(self.sizes.rows), width, self.new_capture())

    def release(self, *more: str) -> None:
        """Give back the memory of decoding, and `more`."""
        for name in ("decoder", "cache", "geometry", "view", *more):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def has_gpu() -> bool:
    return torch.cuda.is_available()


def on_gpu() -> Bench:
    device = torch.device("cuda", torch.cuda.current_device())
    return Bench(REAL, device, lambda: capture_on(device))


def toy() -> Bench:
    """On the CPU, without its C kernels, with the tests' double of CUDA graphs."""
    sys.path.append(str(Path(__file__).parent.parent / "tests" / "doubles"))
    from cuda_graphs import Captures

    build.load = lambda: None
    return Bench(_TOY, torch.device("cpu"), Captures)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
