"""A profile of this package on one GPU: one process, about a minute, weights that are made on the spot.

    python benchmarks/gpu_profile.py [--toy] [--json FILE] [PART ...]

Needs torch, triton, transformers, pydantic and psutil, and the sources of the package. It needs no network and does not
import DeepSpeed. The model has the shapes of Qwen2.5-1.5B. Each part has a limit of seconds. A part that fails or is
late keeps what it has measured, the others still run, and the file is written after each:

    versions          packages, the GPU, and what it reaches in a matrix product and in reading memory
    model             making the weights
    checks            which attention trains and decodes; the gap of each kernel to its definition in torch, as the norm
                      of the difference over that of the result
    capturing         seconds of capturing all decode steps as CUDA graphs, at first and when all is compiled
    decode            milliseconds of a step of `Decoder`, by rows and context, and of reading weights and cache once
    decode_kernels    the longest kernels of these steps
    prefill           tokens per second, of prompts and of answers after a context
    training          forward and backward of one micro-batch, with model FLOPs utilization (MFU)
    training_kernels  its longest kernels
    products          the steps with the kernel for products of few rows, by torch, and with weights in eight bits
    tune              what `hybrid-grpo tune` finds, which is not used here
    peers             if it is named: steps beside figures that others have published

`--toy` runs all parts at toy sizes on the CPU, in torch and Triton's interpreter, to show that the script runs.
"""

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOY = "--toy" in sys.argv
if TOY:  # before Triton and torch are imported
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
sys.path.insert(0, str(Path(__file__).parent.parent))

try:
    import gpu_bench
    import gpu_profile_parts as parts
    from gpu_checks import checks
    from machine import parser_of, save
except ModuleNotFoundError as error:
    sys.exit(f"gpu_profile.py: there is no {error.name}: pip install {error.name}, or see benchmarks/gpu_pack.sh")

Found = dict[str, Any]
PARTS: dict[str, tuple[Callable[[gpu_bench.Bench, Found], None], float]] = {
    "versions": (parts.versions, 15), "model": (parts.model, 20), "checks": (checks, 60),
    "capturing": (parts.capturing, 90), "decode": (parts.decode, 40), "decode_kernels": (parts.decode_kernels, 20),
    "prefill": (parts.prefill, 30), "training": (parts.training, 60), "training_kernels": (parts.training_kernels, 30),
    "products": (parts.products, 45), "tune": (parts.tune, 40), "peers": (parts.peers, 240),
}  # fmt: skip
"""Each part, and the most seconds that it may take on a GPU."""


class OutOfTime(BaseException):
    """Raised in a part that is late. Not an Exception: a kernel whose check is interrupted has not failed it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the main thread after `seconds`, as soon as Python runs again."""

    def stop(*_: object) -> None:
        raise OutOfTime(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(bench: gpu_bench.Bench, name: str) -> Found:
    """Run a part. Returns what it found, its seconds, the warnings of the package, and the error if it failed."""
    part, seconds = PARTS[name]
    found: Found = {}
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with limited(10 * seconds if TOY else seconds):
                part(bench, found)
                bench.synchronize()
        except (Exception, OutOfTime) as error:
            found["failed"] = gpu_bench.first_line(error)
            found["traceback"] = traceback.format_exc()
    ours = dict.fromkeys(str(w.message) for w in told if issubclass(w.category, UserWarning))
    return found | {"warnings": list(ours), "part_seconds": round(time.perf_counter() - start, 2)}


def lines(name: str, found: Found) -> Iterator[str]:
    """The rows that are printed for a part."""
    yield f"== {name}, {found['part_seconds']} s" + (f", FAILED: {found['failed']}" if "failed" in found else "")
    for what, value in found.items():
        if what not in ("failed", "traceback", "part_seconds"):
            yield from (f"{what:28} {_words(row)}" for row in (value if isinstance(value, list) else [value]))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_words(part)}" for name, part in value.items())
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--toy", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    given = parser.parse_args()
    if unknown := set(given.part) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}, only {', '.join(PARTS)}")
    if not (given.toy or gpu_bench.has_gpu()):
        sys.exit("gpu_profile.py: torch finds no CUDA device; --toy shows on a CPU that the script runs")
    bench, results = gpu_bench.toy() if given.toy else gpu_bench.on_gpu(), {}
    for name in [name for name in PARTS if name in (given.part or PARTS.keys() - {"peers"})]:
        results[name] = run(bench, name)
        print("\n".join(lines(name, results[name])), flush=True)
        save(given.json, results)
    print(f"in all {sum(found['part_seconds'] for found in results.values()):.0f} s, without the imports")
    if failed := [name for name, found in results.items() if "failed" in found]:
        sys.exit(f"gpu_profile.py: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
