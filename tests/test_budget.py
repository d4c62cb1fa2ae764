"""What a decode step and the head ask of a GPU stays within bounds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BUDGET = Path(__file__).parent.parent / "benchmarks" / "budget.py"
MOST = {
    **{"decode_kernels": 235, "tail_kernels": 150, "switch_launches": 340},
    **{"delta_gb": 1.2, "delta_torch_kernels": 40, "delta_torch_gb": 10},
    **{"sampler_gb": 0.5, "sampler_top_p_gb": 0.8, "head_launches": 200, "head_gb": 25},
    **{"training_elementwise_gb_1.5b": 170, "training_elementwise_gb_7b": 400},
}


@pytest.mark.process
def test_kernels_and_traffic_stay_within_the_budget(tmp_path):
    file = tmp_path / "budget.json"
    subprocess.run([sys.executable, BUDGET, "--json", file], check=True, capture_output=True)
    numbers = json.loads(file.read_text())
    assert numbers.keys() == MOST.keys()
    # Each is more than nothing: a kernel that was not counted would pass any bound.
    assert all(MOST[name] / 10 < number <= MOST[name] for name, number in numbers.items()), numbers
