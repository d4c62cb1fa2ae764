import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "support" / "compile_kernels.py"
SHARED_MEMORY = 48 << 10
"""Bytes that a program may take on any GPU without asking for more."""


# A10G and RTX 30: the least shared memory of all. All six generations are for benchmarks/kernels.py.
@pytest.mark.process
@pytest.mark.parametrize("architecture", ["86"])
def test_kernels_compile_for_gpus_of_each_generation(architecture, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, PROGRAM, architecture], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    shared = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _ in shared} == {
        *("_add_norm", "_silu_times", "_rotate_and_store", "_sample", "_add", "_gradient")
    }
    assert all(int(size) <= SHARED_MEMORY for _, size in shared)
