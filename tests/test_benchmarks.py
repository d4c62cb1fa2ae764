"""The parts of benchmarks/step.py that need no trainer."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import step_worker
from step import summary
from step_worker import Stopwatch
from step_workloads import Job


class Program:
    """Its clock stands still but for what its methods say they take."""

    now = 0.0

    def outer(self):
        self.now += 2.0
        self.inner()
        self.now += 1.0

    def inner(self):
        self.now += 5.0


def test_a_stage_inside_another_is_taken_out_of_it(monkeypatch):
    program, watch = Program(), Stopwatch()
    monkeypatch.setattr(step_worker, "time", SimpleNamespace(perf_counter=lambda: program.now))
    watch.watch(program, "outer", "outer")
    watch.watch(program, "inner", "inner")
    program.outer()
    program.now += 100.0
    program.inner()
    assert watch.seconds == {"outer": 3.0, "inner": 10.0}


def job(budget: int) -> Job:
    settings = {
        "policy.model": "model",
        "policy.micro_batch_tokens": budget,
        "data.path": "rows.jsonl",
        "rollout.prompts_per_step": 3,
        "rollout.num_generations": 8,
        "rollout.max_completion_tokens": 70,
        "rewards": '[{"function": "exact_match"}]',
    }
    return Job([part for name, value in settings.items() for part in (f"--{name}", str(value))], longest_prompt=30)


@pytest.mark.parametrize("budget, rows", [(99, 1), (799, 6), (10_000, 24)])
def test_micro_batches_in_rows_fit_the_budget_of_tokens_and_divide_the_step(budget, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    spec = job(budget).spec(3, threads=1)
    assert spec["micro_rows"] == rows
    assert spec["config"]["engine"]["zero_stage"] == 3


def test_train_is_its_three_parts():
    stages = {"generate": 1.0, "reward": 0.0, "reference": 0.0, "forward": 2.0, "backward": 4.0, "optimizer": 0.5}
    run = {"seconds": 8.0, "stages": {**stages, "rest": 0.5}, "generated_tokens": 1, "trained_tokens": 2}
    run |= {"computed_over_real": 1.5, "peak_rss_gb": 1.0, "increment_gb": 0.5}
    result = summary([run, {**run, "seconds": 10.0}, {**run, "seconds": 6.0}])
    assert (result["median_s"], result["min_s"], result["max_s"]) == (8.0, 6.0, 10.0)
    assert result["stages_s"]["train"] == 6.5
    assert sum(result["stages_s"].values()) == 8.0


HELP = """
import runpy, sys
for path in sys.argv[1:]:
    before, sys.argv = list(sys.path), [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        assert ended.code == 0, path
    sys.path[:] = before
"""


@pytest.mark.process
def test_every_benchmark_finds_what_it_imports():
    """That of reward models looked for a file of the tests where it had been before the tests were sorted."""
    scripts = [path for path in (ROOT / "benchmarks").glob("*.py") if "argparse" in path.read_text()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks")))}
    command = [sys.executable, "-c", HELP, *map(str, scripts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(scripts) > 7 and done.stdout.count("usage: ") == len(scripts)
