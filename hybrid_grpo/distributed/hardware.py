"""The device that a rank runs on: which one it takes, how much memory is free there and on its host, and its speed."""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed.ranks import local_ranks, own_cores

_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
"""Files with the memory limit and use of this container, under cgroups version 2 and 1."""
CUDA_CONTEXT_BYTES = 550 << 20
"""CUDA's context and workspaces: what `nvidia-smi` shows for a process on top of torch's memory. An estimate."""


@dataclass(frozen=True)
class Hardware:
    """One rank's device and its share of the host."""

    name: str
    on_gpu: bool
    device_bytes: int
    """Free memory of the device, plus the memory that CUDA itself takes in this process; on a CPU, `host_bytes`."""
    host_bytes: int
    """This rank's share of the host's free memory, plus `process_bytes`."""
    process_bytes: int
    """Host memory that the process already uses."""
    flops: float
    """Floating-point operations per second in large matrix products of the weights' dtype; NaN if not measured."""
    bandwidth: float
    """Bytes per second read from the device's memory; NaN if not measured."""


GPUS = {
    "rtx3090": (24, 71e12, 0.94e12, r"RTX 3090$"),
    "rtx4090": (24, 165e12, 1.01e12, r"RTX 4090$"),
    "rtx5090": (32, 210e12, 1.79e12, r"RTX 5090$"),
    "a10g": (23.8, 70e12, 0.6e12, r"\bA10G\b"),
    "a100-40gb": (40, 312e12, 1.56e12, r"A100\b"),
    "a100-80gb": (80, 312e12, 2.04e12, r"A100\b"),
    "l40s": (47.6, 362e12, 0.86e12, r"L40S\b"),
    # Cards for a PCIe slot are slower.
    "h100": (80, 989e12, 3.35e12, r"\bH100\b(?!.*(PCIe|NVL))"),
    "h200": (141, 989e12, 4.8e12, r"\bH200\b(?!.*NVL)"),
    "b200": (180, 2250e12, 8.0e12, r"\bB200\b"),
}
"""GPUs from data sheets: memory in 10^9 bytes, dense bfloat16 operations per second, bytes read per second, and a
regular expression for the name that CUDA reports. Where error correction takes a part of the memory, it is what CUDA
reports."""


def take_gpu(accelerator: Any) -> None:
    """Select this rank's GPU before CUDA starts in the process; set its allocator, NCCL and the number of host threads.

    `accelerator` is DeepSpeed's. Raises UserError if torch sees too few GPUs.
    """
    # Expandable segments fragment less when rollouts and training alternate. torch has read the variables on import.
    if not (os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    os.environ.setdefault("TORCH_NCCL_PROPAGATE_ERROR", "1")  # what NCCL finds on one rank ends all
    count, local = accelerator.device_count(), int(os.environ["LOCAL_RANK"])
    if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        # The launcher lets each rank see only its own GPU, as Slurm does with --gpus-per-task.
        local = 0
    if local >= count:
        raise UserError(
            f"rank {os.environ['RANK']} is number {local} on its machine, where torch sees {count} GPUs: start one rank"
            " per GPU, or let it see more (CUDA_VISIBLE_DEVICES)"
        )
    os.environ["LOCAL_RANK"] = str(local)  # DeepSpeed reads it too
    accelerator.set_device(local)
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    if "OMP_NUM_THREADS" not in os.environ or by_torchrun:
        threads = own_cores()
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)


def allocator_fact(device: torch.device) -> dict[str, str]:
    """Return the settings of torch's allocator of GPU memory, as a line for the console; nothing for a CPU."""
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # torch 2.11 has none
    return {} if device.type == "cpu" or settings is None else {"allocator": settings() or "default"}


def refuse_idle_gpus() -> None:
    """Raise UserError if torch cannot use this machine's GPUs, unless the CPU was chosen."""
    gpus = list(Path("/dev").glob("nvidia[0-9]*"))
    if gpus and "DS_ACCELERATOR" not in os.environ and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build for the CPU"
        raise UserError(
            f"this machine has {len(gpus)} GPUs that torch cannot use: torch {torch.__version__} {built}: update the"
            " driver, install a torch for it (for CUDA 12 TORCH_INDEX=https://download.pytorch.org/whl/cu126 with"
            " training_scripts/setup.sh), or set DS_ACCELERATOR=cpu to train on the CPU"
        )


def peak_flops(name: str) -> float | None:
    """Return the dense bfloat16 operations per second of a GPU by its CUDA name; None if unknown or a MIG slice."""
    found = (flops for _, flops, _, called in GPUS.values() if re.search(called, name))
    return None if "MIG" in name else next(found, None)


def of_table(name: str) -> Hardware:
    """Return a GPU according to its data sheet, with all of its memory free, on a host with unlimited memory."""
    gigabytes, flops, bandwidth, _ = GPUS[name]
    process = psutil.Process().memory_info().rss
    return Hardware(name, True, int(gigabytes * 1e9), 1 << 62, process, flops, bandwidth)


def of_device(device: torch.device, dtype: Literal["bfloat16", "float32"] | None = None) -> Hardware:
    """Return the device in its present state. With the `dtype` of weights its speed is measured, which takes a fraction
    of a second; otherwise `flops` and `bandwidth` are NaN."""
    process = psutil.Process().memory_info().rss
    host = process + host_free_bytes() // local_ranks()
    flops, bandwidth = (math.nan, math.nan) if dtype is None else _speed(device, getattr(torch, dtype))
    if device.type == "cpu":
        return Hardware("cpu", False, host, host, process, flops, bandwidth)
    # Free what the measurement took. What CUDA took when it started is part of the plan.
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0] + CUDA_CONTEXT_BYTES
    return Hardware(torch.cuda.get_device_name(device), True, free, host, process, flops, bandwidth)


def device_bytes(device: torch.device) -> int:
    """Return the bytes of all memory of the device, free or not."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().total)
    return int(torch.cuda.get_device_properties(device).total_memory)


def host_free_bytes() -> int:
    """Return the bytes of host memory that are still free within the limit of this container."""
    free = int(psutil.virtual_memory().available)
    for limit, used in _CGROUPS:
        if limit.is_file() and (most := limit.read_text().strip()) != "max":
            # Cached files count as used in a container, although the system can drop them.
            free = min(free, max(0, int(most) - int(used.read_text()) + _file_cache(limit.parent)))
    return free


def _file_cache(cgroup: Path) -> int:
    """Return the bytes of cached files that the system can drop, since they are neither mapped nor modified."""
    statistics = cgroup / "memory.stat"
    lines = (line.split() for line in statistics.read_text().splitlines()) if statistics.is_file() else ()
    return sum(int(value) for name, value in lines if name in ("inactive_file", "total_inactive_file"))


def _speed(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Measure floating-point operations per second in a square matrix product, and bytes per second in a sum."""
    from torch.utils.benchmark import Timer

    size, mebibytes = (512, 32) if device.type == "cpu" else (8192, 1024)
    a = torch.ones(size, size, dtype=dtype, device=device)
    long = torch.ones(mebibytes << 18, dtype=torch.float32, device=device)
    # The timer waits until a GPU has finished.
    product_s, sum_s = (
        Timer(work, globals={"x": x}, num_threads=torch.get_num_threads()).timeit(5).median
        for work, x in (("x @ x", a), ("x.sum()", long))
    )
    return 2 * size**3 / product_s, long.nbytes / sum_s
