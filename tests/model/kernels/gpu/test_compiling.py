import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "support" / "compile_kernels.py"
SHARED_MEMORY = 99 << 10
"""Bytes that a program may take on the GPUs that have least: those of generations 8.6, 8.9 and 12.0."""


ALL = "KERNEL_CASES" in os.environ
# Hopper (H100, H200), each kernel once; with KERNEL_CASES every launch, also for A100, A10G, 4090 and L40S, B200, 5090,
# which takes most of a minute each.
ARCHITECTURES = ["90", *(["80", "86", "89", "100", "120"] if ALL else [])]


@pytest.mark.process
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_for_gpus_of_each_generation(architecture, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, PROGRAM, architecture, *([] if ALL else ["once"])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    used = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, *_ in used} == {
        *("_attend", "_schedule", "_add_norm", "_silu_times", "_sample", "_add", "_gradient", "_product", "_search"),
        *("_add_norm_backward", "_silu_times_backward", "_rotate", "_convolve", "_delta", "_mamba", "_sum_weights"),
    }
    # A call takes some bytes of the stack.
    assert all(int(size) <= SHARED_MEMORY and int(spilled) <= 16 for _, size, spilled in used), used
