"""The parts of benchmarks/step.py that need no trainer."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from types import SimpleNamespace

import forks
import pytest
import torch
from paths import ROOT
from warm_python import programs

sys.path.append(str(ROOT / "benchmarks"))

import gpu_packages
import gpu_profile
import mutation
import plan
import rollout
import step
import step_worker
import step_workloads
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
        "policy.model": "model", "policy.micro_batch_tokens": budget, "data.path": "rows.jsonl",
        "rollout.prompts_per_step": 3, "rollout.num_generations": 8, "rollout.max_completion_tokens": 70,
        "rewards": '[{"function": "exact_match"}]',
    }  # fmt: skip
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


HELP = """
import os, runpy, sys
for path in sys.argv[1:]:
    before, sys.argv = list(sys.path), [path, "--help"]
    sys.path.insert(0, os.path.dirname(path))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        assert ended.code == 0, path
    sys.path[:] = before
"""


@pytest.mark.process
def test_every_benchmark_finds_what_it_imports():
    """That of reward models looked for a file of the tests where it had been before the tests were sorted."""
    texts = {path: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    scripts = [path for path, text in texts.items() if "__main__" in text and "parser" in text]
    done = forks.run("-c", HELP, *scripts)
    assert done.status == 0, done.err
    assert len(scripts) > 7 and done.out.count("usage: ") == len(scripts)


def gpu_sh(out, *arguments: str, script=ROOT / "benchmarks/gpu.sh") -> subprocess.CompletedProcess[str]:
    trl = os.environ.get("TRL_ENV", str(step.TRL))
    path = f"{programs()}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "SKIP_SETUP": "1", "TRL_ENV": trl}
    for name in ("RANK", "OUT"):
        environment.pop(name, None)
    command = ["bash", str(script), "--toy", "--out", str(out), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.process
def test_the_profile_measures_every_part_at_toy_sizes(tmp_path):
    done = gpu_sh(tmp_path, "profile")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "gpu/profile.json").read_text())
    assert [*found, "peers"] == list(gpu_profile.PARTS)
    assert not [name for name, part in found.items() if "failed" in part or part["warnings"]]
    assert found["checks"]["attention"].startswith("training by torch")
    gaps = [gap for row in found["checks"].values() if isinstance(row, dict) for gap in row.values()]
    assert all(gap < 1e-5 for gap in gaps if isinstance(gap, float)) and "FAILED" not in str(found["checks"])
    decode = {case: row for case, row in found["decode"].items() if " x " in case}
    assert list(decode) == ["1 x 20", "2 x 20", "2 x 20, from few to twice as many", "1 x 40", "2 x 40"]
    assert all(0 < row["floor_ms"] < row["ms"] for row in decode.values())
    assert found["capturing"]["again"]["forwards"] == 2 and found["training"]["checkpointing"]["mfu"] > 0
    assert len(found["training_kernels"]["kernels"]) == len(found["decode_kernels"]["kernels of 2 x 20"]) == 15
    assert all(
        found["products"][f"ms of {rows} rows, by {by}"] > 0
        for rows in (1, 2)
        for by in ("the kernel", "torch", "eight bits")
    )
    assert found["tune"]["few"] > 0
    assert "ms a decode step" in (tmp_path / "gpu.md").read_text()


def test_a_part_of_the_profile_that_fails_or_is_late_keeps_what_it_found(monkeypatch):
    """Kernels are given up on any Exception: that a part is late is none of theirs."""

    def late(bench, found):
        found["first"] = 1
        try:
            time.sleep(5)
        except Exception:
            found["swallowed"] = True

    def failing(bench, found):
        found["first"] = 1
        raise RuntimeError("no memory\nmore")

    monkeypatch.setattr(gpu_profile, "PARTS", {"late": (late, 0.1), "failing": (failing, 5)})
    bench = gpu_profile.gpu_bench.Bench(None, torch.device("cpu"), None)
    for name, why in (("late", "stopped after 0 s"), ("failing", "no memory")):
        found = gpu_profile.run(bench, name)
        assert found["first"] == 1 and found["failed"] == why and "swallowed" not in found


def test_a_machine_without_network_is_given_what_torch_does_not_bring(monkeypatch, capsys):
    """pydantic too, which transformers requires only through later versions of huggingface-hub."""
    monkeypatch.setattr(sys, "argv", ["gpu_packages.py", "3.12"])
    gpu_packages.main()
    packed = {line.split("==")[0] for line in capsys.readouterr().out.split()}
    assert packed >= {"deepspeed", "transformers", "pydantic", "pydantic-core", "psutil", "ninja", "pytest"}
    assert packed >= {"datasets", "pyarrow", "pandas", "gguf", "trl", "accelerate"}
    assert not packed & {"torch", "triton", "numpy", "tokenizers", "wandb", "hybrid-grpo"}


@pytest.mark.process
@pytest.mark.parametrize("halves, joined", [((b"one", b"two"), True), ((b"one", b"twp"), False)])
def test_weights_in_halves_are_joined_where_they_are_whole(tmp_path, monkeypatch, halves, joined):
    """In a folder as gpu_pack.sh makes it, without wheels."""
    (tmp_path / "base/wheels").mkdir(parents=True)
    (tmp_path / "base/hybrid_grpo").symlink_to(ROOT)
    (tmp_path / "base/weights.sha256").write_text(hashlib.sha256(b"onetwo").hexdigest() + "\n")
    for number, half in enumerate(halves, 1):
        (tmp_path / f"weights_{number}").mkdir()
        (tmp_path / f"weights_{number}/half").write_bytes(half)
    monkeypatch.setenv("HYBRID_GRPO_CACHE", str(tmp_path / "cache"))
    done = gpu_sh(tmp_path / "out", "none", script=tmp_path / "base/hybrid_grpo/benchmarks/gpu.sh")
    assert done.returncode == 1 and "there is no part none" in done.stderr
    assert ("weights of real are not whole" in done.stderr) is not joined
    assert (tmp_path / "cache/SmolLM2-135M-Instruct.Q4_1.gguf").exists() is joined


@pytest.mark.process
def test_every_part_of_the_gpu_script_runs_at_toy_sizes_and_only_once(tmp_path):
    """On the CPU, in three leases and without one; without TRL that part alone fails, and says what is missing."""
    missing = not os.path.exists(os.path.join(os.environ.get("TRL_ENV", step.TRL), "bin/python"))
    for lease in ("lease_a", "lease_b", "lease_c"):
        done = gpu_sh(tmp_path, lease)
        assert done.returncode == (lease == "lease_b" and missing), done.stdout[-3000:] + done.stderr[-3000:]
        with tarfile.open(tmp_path / f"{lease}.tar.gz") as archive:
            assert {"gpu.json", "gpu/runs/ranks/zero3/metrics.jsonl"} <= {*(names := archive.getnames())}
            assert not [name for name in names if name.endswith(".safetensors")]
    done = gpu_sh(tmp_path)
    assert done.returncode == missing, done.stdout[-3000:] + done.stderr[-3000:]
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    steps = ["step_zero2", "step_zero3", "step_stored"]
    of_leases = ["tests", "step_zero2", "ranks", "step_stored", "trl", "step_zero3", "peers", "quickstart", "plan"]
    assert list(parts) == ["profile", *of_leases, "decode_tiny"]
    assert done.stdout.count(": done before") == len(parts) - 1 - missing
    assert [name for name, part in parts.items() if "failed" in part] == ["trl"] * missing
    assert not missing or "bash benchmarks/trl_env.sh" in parts["trl"]["failed"]
    assert parts["tests"]["results"]["passed"] == 0 < parts["tests"]["results"]["skipped"]
    engines = parts["decode_tiny"]["results"]["workloads"]["toy"]
    assert 0 < engines["hybrid"]["floor_s"] < engines["hybrid"]["median_s"] and len(engines) == 3
    for name in steps:
        [ours] = parts[name]["results"]["workloads"]["toy"].values()
        assert 0 < ours["switch_share"] < 1 and ours["logp_gap_max"] < 1e-5
    for two in parts["ranks"]["results"].values():
        assert two["same, first step"] == 1 and two["losses apart, first step"] < 1e-6, two
        assert two["statuses"][1] == -signal.SIGKILL and two["statuses"][0] and two["steps_before"] == 2
    assert parts["plan"]["results"]["cases"]["letters"]["ratio"] == pytest.approx(1, abs=0.25)
    assert parts["quickstart"]["results"]["completions"] == 16
    assert parts["peers"]["results"]["peers"]["toy, 40 tokens, rank 2"]["times_published"] > 0
    table = (tmp_path / "gpu.md").read_text()
    assert table.count("\n| ") == 12 and table.strip() in done.stdout
    again = gpu_sh(tmp_path, "tests", "quickstart", "decode_9b")
    assert again.stdout.count(": done before") == 2 and again.stdout.count("== ") == 2
    assert again.returncode == 1 and "there is no part decode_9b, only profile, tests, step_zero2" in again.stderr
    listed = subprocess.run(["bash", ROOT / "benchmarks/gpu.sh", "--list"], capture_output=True, text=True).stdout
    assert listed.split()[:7] == ["profile", "tests", *steps, "peers", "ranks"]


@pytest.mark.process
def test_the_parts_of_a_gpu_are_told_what_their_programs_know(tmp_path, monkeypatch):
    """With a python that only writes down what it is told, and a machine that says it has a GPU."""
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl/ready").touch()
    programs = {
        "python": f"""case "$1" in
            benchmarks/gpu_results.py) exec "{sys.executable}" "$@" ;;
            benchmarks/*) printf '%s\\x1f' "$@" >>"{tmp_path}/calls"; echo >>"{tmp_path}/calls" ;;
        esac""",
        "nvidia-smi": 'echo "NVIDIA H100 80GB HBM3, 81559 MiB, 580.95"',
    }
    for name, lines in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SKIP_SETUP": "1", "TRL_ENV": str(tmp_path / "trl")}
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    # Those of the quickstarts look for GPUs themselves, and find none.
    assert done.stderr.count("gpu.sh: failed: quickstart real;") == 1, done.stderr
    # As quick to make as it is to parse.
    tiny = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    tiny = {**step_workloads.MODELS["Qwen2.5-1.5B"], **tiny}
    monkeypatch.setitem(step_workloads.MODELS, "Qwen2.5-1.5B", tiny)
    calls = [line.split("\x1f")[:-1] for line in (tmp_path / "calls").read_text().splitlines()]
    assert len(calls) == 12
    for program, *options in calls:
        monkeypatch.setattr(sys, "argv", [program, *options])
        if program.endswith("gpu_profile.py"):
            assert options[-2:][:1] == ["--json"]
        elif program.endswith("rollout.py"):
            assert rollout.parse().alone
        elif program.endswith("step.py"):
            told = step.parse()
            assert told.settings in ([], ["--policy.gradient_checkpointing", "false"])
            for side in told.sides:
                stage, foreign = step.SIDES[side].stage, step.SIDES[side].foreign
                config = step.JOBS[told.workload[0]](tmp_path).spec(stage, 1, told.settings, foreign)["config"]
                assert (config["policy"]["dtype"], config["engine"]["zero_stage"]) == ("bfloat16", stage)
        elif program.endswith("gpu_ranks.py"):
            assert options[1:] == ["--json", str(tmp_path / "gpu/ranks.json")]
        else:
            assert plan.CASES[options[0]].on_gpu
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [name for name, part in parts.items() if "failed" in part] == ["quickstart", "real"]
    assert parts["decode_7b"]["machine"].startswith("NVIDIA H100")
    late = subprocess.run([*command, "lease_b", "--again"], env={**environment, "LEASE_S": "20"}, capture_output=True)
    assert late.returncode == 1 and late.stdout.count(b"no time is left for it") == 3


def test_what_faults_are_put_into_and_tested_with_is_there():
    folders = [*(ROOT / "hybrid_grpo" / name for name in mutation.FILES), *(ROOT / "tests" / n for n in mutation.TESTS)]
    tests = [ROOT / f"tests/test_{name}.py" for name in mutation.TOP]
    assert all(path.exists() for path in [*folders, *tests])
