"""A run whose reward function fails in every way there is."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from paths import ROOT
from reward_helpers import command_lines, in_time
from warm_python import programs

BENCHMARK = ROOT / "benchmarks" / "rewards.py"


@pytest.mark.ranks
def test_a_hostile_reward_costs_its_completions_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    # The benchmark starts its run by the launcher beside the interpreter.
    monkeypatch.setattr(sys, "executable", str(programs() / "python"))
    spec = spec_from_file_location("rewards_benchmark", BENCHMARK)
    assert spec is not None and spec.loader is not None
    benchmark = module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    benchmark.TIMEOUT = 1.0  # where tests share the processor, calls that do not hang have taken half a second
    benchmark.make_task(tmp_path)
    rows = benchmark.train(tmp_path, "faults", 15)
    found = benchmark.counts(tmp_path / "faults", rows)
    assert [row["step"] for row in rows] == list(range(1, 16))
    assert found["completions"] == 15 * 16 * 8
    assert found["counted"] == found["foreseen"] and min(found["counted"].values()) > 10
    assert found["rewards otherwise"] == 0
    # Of those that hang, a rank's two workers or more wait for two at a time; nothing else takes long.
    hangs = found["counted"]["timeout"]
    assert sum(row["time/reward_wait_s"] for row in rows) < hangs * benchmark.TIMEOUT + 15
    assert in_time(lambda: not any(str(tmp_path) in line for line in command_lines())), "nothing is left"
