"""Kills of benchmarks/faults.py, which breaks real runs in many more ways and compares what is left. Stops and stalls
are in tests/run/."""

import sys

import pytest
from paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import faults
from fault_bench import Bench

pytestmark = pytest.mark.ranks
CASES = {
    "killed where the ranks meet": {"point": "meeting", "nth": 1, "rank": 0, "action": "kill"},
    "killed while it saves": {"point": "saving", "nth": 3, "rank": 1, "action": "kill"},
    "killed while its thread writes": {"point": "writing", "nth": 8, "rank": 1, "action": "kill"},
    "killed before the manifest": {"point": "the manifest", "nth": 4, "rank": 0, "action": "kill"},
    "killed in the export": {"point": "export", "nth": 1, "rank": "all", "action": "kill"},
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults").resolve(), seed=0)


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_killed_ends_and_goes_on_to_the_same_end(bench: Bench, case: str) -> None:
    beside = CASES[case]["point"] in ("writing", "the manifest")
    entry = faults.tried(bench, case, faults.kill_writing if beside else faults.kill_at, (CASES[case],))
    assert entry["passed"], entry["why"]
