"""A few cases of benchmarks/faults.py, which breaks real runs in many more ways and compares what is left."""

import sys

import pytest
from paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import faults
from fault_bench import Bench

pytestmark = pytest.mark.ranks
CASES = {
    "killed while it saves": ("_kill_at", {"point": "saving", "nth": 3, "rank": 1, "action": "kill"}),
    "killed in the export": ("_kill_at", {"point": "rename", "nth": -1, "rank": 0, "action": "kill"}),
    "stopped while it samples": ("_stall", {"point": "sampling", "nth": 20, "rank": 1, "action": "stopped"}),
    "hangs while it updates": ("_stall", {"point": "update", "nth": 3, "rank": 0, "action": "hang in C"}),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults").resolve(), seed=0)


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_breaks_ends_and_goes_on_to_the_same_end(bench: Bench, case: str) -> None:
    function, fault = CASES[case]
    entry = faults.tried(bench, case, getattr(faults, function), (fault,))
    assert entry["passed"], entry["why"]


def test_a_stop_that_is_asked_for_is_saved_and_loses_nothing(bench: Bench) -> None:
    entry = faults.tried(bench, "SIGTERM", faults._signal, ("SIGTERM", "rank 1", 0.6 * bench.seconds))
    assert entry["passed"], entry["why"]
