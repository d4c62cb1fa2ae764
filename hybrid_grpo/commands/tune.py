"""`tune`: measures how the kernels of a decode step share their work best on this machine's GPU."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.generation.paged_attention import PAGE
from hybrid_grpo.model.kernels import gpu

_HELP = """usage: hybrid-grpo tune

Measure how the kernels that decode share their work best on the first GPU. Later runs on GPUs of this kind read the
result, tilings.json in HYBRID_GRPO_CACHE (default: ~/.cache/hybrid_grpo): give all ranks the same.
"""
_ROWS = 16, 32, 64, 128, 256
_EPSILON = 1e-6
Work = Callable[[], object]


def run(arguments: list[str]) -> None:
    if arguments:
        refuse(arguments not in (["--help"], ["-h"]), "usage: hybrid-grpo tune")
        print(_HELP, end="")
        return
    refuse(not torch.cuda.is_available() or gpu.triton is None, "tune needs a GPU, and Triton: there is none here")
    device, path = torch.device("cuda", torch.cuda.current_device()), gpu.tilings.file()
    card, before = torch.cuda.get_device_properties(device), gpu.tilings.tiling_of(device)
    found = tuned(Layer(device), card.multi_processor_count, milliseconds)
    write(path, gpu.tilings.name_of(card), found)
    for name, value in found._asdict().items():
        print(f"{name:9} {value:4} (before: {getattr(before, name)})")
    print(f"{card.name}: written to {path}")


def milliseconds(work: Work) -> float:
    """Measure work on a GPU as steps run it, in a CUDA graph, where launching takes the host no time."""
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(work, rep=20, return_mode="median"))


def write(path: Any, name: str, found: Any) -> None:
    """Add the tiling of a GPU to a file. Raises UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, name: found._asdict()}, indent=1))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: {error}: remove it, or name another folder in HYBRID_GRPO_CACHE") from error


def tuned(layer: "Layer", units: int, measure: Callable[[Work], float]) -> Any:
    """Return the fastest tiling for a device of `units` multiprocessors. Programs of attention are tried with few
    sequences and with many, those of products with few rows; whole layers, ours beside torch's, say up to how many rows
    ours are used."""
    best = before = gpu.tilings.tiling_of(layer.device)

    def seconds(tiling: Any, works: list[Work]) -> float:
        gpu.tilings.use(layer.device, tiling)
        return sum(map(measure, works))

    for name, works in (
        ("few", [layer.attention(1), layer.attention(4)]),
        ("many", [layer.attention(128, longest=8)]),
        ("products", [layer.products(n, by_kernel=True) for n in (1, 16, 32)]),
    ):
        choices = [best, *(best._replace(**{name: share * units}) for share in (1, 2, 4))]
        best = min(choices, key=lambda tiling: seconds(tiling, works))
    gpu.tilings.use(layer.device, best)
    most_rows = 0
    for n in _ROWS:
        ours, torchs = (measure(layer.products(n, by_kernel=by_kernel)) for by_kernel in (True, False))
        if ours > torchs:
            break
        most_rows = n
    gpu.tilings.use(layer.device, before)
    return best._replace(most_rows=most_rows)


class Layer:
    """Work of one layer in a decode step, by default of Qwen2.5-1.5B, whose `entries` no cache of a GPU holds."""

    def __init__(self, device: torch.device, hidden: int = 1536, inner: int = 8960, entries: int = 1 << 17) -> None:
        self.device, self._hidden, self._entries = device, hidden, entries
        self._qkv, self._o, self._gate_up, self._down = (
            self._random(outputs, inputs)
            for outputs, inputs in ((hidden + 512, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
        )
        self._norm, self._scratch = self._random(hidden), dict[Any, Any]()

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device) / 100

    def attention(self, n: int, *, longest: int = 1) -> Work:
        """Attention to `entries` of n equal sequences, or of some of up to `longest` times as many."""
        keys, values = (self._random(longest * self._entries // PAGE, PAGE, 2, 128) for _ in range(2))
        table = torch.arange(len(keys), dtype=torch.int32, device=self.device).view(n, -1)
        shares = torch.linspace(1 / n if longest > 1 else 1, 1, n, device=self.device)
        last = (longest * self._entries // n * shares).long() - 1
        query = self._random(n, self._hidden // 128, 128)
        return partial(
            gpu.attention.paged_attention, query, keys, values, table, last, 128**-0.5, 0, 0.0, None, self._scratch,
            schedules={},
        )  # fmt: skip

    def products(self, n: int, *, by_kernel: bool) -> Work:
        """All products of `n` rows, with norms, gate and sums, which the work returns."""
        x, found, inner = (self._random(n, size) for size in (self._hidden, len(self._qkv), self._down.shape[1]))
        both, given, normed = self._random(n, len(self._gate_up)), self._random(n, self._hidden), torch.empty_like(x)
        scale = torch.empty(n, device=self.device)

        def ours() -> Tensor:
            product, matrix = partial(gpu.products.product, scratch=self._scratch), gpu.products.Matrix
            product(x, matrix(self._qkv), found, norm=self._norm, epsilon=_EPSILON)
            product(given, matrix(self._o), x, add=True)
            product(x, matrix(self._gate_up), inner, norm=self._norm, epsilon=_EPSILON, gate=True)
            product(inner, matrix(self._down), x, add=True)
            return x

        def torchs() -> Tensor:
            gpu.norm.rms_norm(x, self._norm, _EPSILON, normed, scale)
            torch.mm(normed, self._qkv.T, out=found)
            torch.addmm(x, given, self._o.T, out=x)
            gpu.norm.rms_norm(x, self._norm, _EPSILON, normed, scale)
            torch.mm(normed, self._gate_up.T, out=both)
            gpu.gate.silu_times(both[:, : inner.shape[1]], both[:, inner.shape[1] :], inner)
            return torch.addmm(x, inner, self._down.T, out=x)

        return ours if by_kernel else torchs
