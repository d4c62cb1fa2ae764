"""From installing to the first captured step on a GPU machine, with CUDA faked: what fails there must fail here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
import torch
import torch.cuda.graphs
from paths import ROOT

from hybrid_grpo.config import EngineConfig, PolicyConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed import hardware
from hybrid_grpo.generation import cache, graphs

SCRIPTS = ROOT / "training_scripts"


def shell(script: str, folder: Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run lines of bash in the repository; programs in `folder` come first on the path."""
    unset = ("DS_ACCELERATOR", "SKIP_SETUP", "TORCH_VERSION", "TORCH_INDEX")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "VIRTUAL_ENV": str(folder), "SETUP_INTO_ACTIVE": "1"}
    environment |= variables
    return subprocess.run(["bash", "-c", script], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def program(path: Path, lines: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{lines}\n")
    path.chmod(0o755)


@pytest.mark.process
def test_deepspeed_is_installed_without_looking_for_a_cuda_toolkit(tmp_path):
    """Its setup.py raises MissingCUDAException where torch is built for CUDA and there is no nvcc."""
    log = f'echo "$DS_BUILD_OPS $DS_IGNORE_CUDA_DETECTION $*" >>"{tmp_path}/pip"'
    program(tmp_path / "python", f'case "$*" in *"-m pip "*) {log} ;; *sys.prefix*) echo "{tmp_path}" ;; esac')
    done = shell(". training_scripts/setup.sh; setup", tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in (tmp_path / "pip").read_text().splitlines() if "deepspeed" in line]
    assert line.startswith("0 1 ") and "--no-build-isolation" in line


@pytest.mark.process
def test_what_could_not_be_installed_does_not_count_as_installed(tmp_path):
    """Also where the script that sources setup.sh goes on after errors."""
    program(tmp_path / "python", f'case "$*" in *deepspeed*) exit 3 ;; *sys.prefix*) echo "{tmp_path}" ;; esac')
    done = shell('. training_scripts/setup.sh; setup dev; echo "status $?"', tmp_path)
    assert done.stdout.endswith("status 3\n") and [path.name for path in tmp_path.iterdir()] == ["python"]


def offered(folder: Path, name: str, version: str, *others: str) -> None:
    """Write pip's report that torch would come with others, each a file of 0.5 GB that takes no room on the disk."""
    packages = [{"metadata": {"name": other, "version": version}} for other in ("torch", *others)]
    with (folder / "wheel").open("wb") as wheel:
        wheel.truncate(500_000_000)
    for package in packages:
        package["download_info"] = {"url": (folder / "wheel").as_uri()}
    (folder / name).write_text(json.dumps({"install": packages}))


@pytest.mark.process
@pytest.mark.parametrize(
    "usual, of_torch, given, line, index",
    [
        ("CUDA", "CPU", {}, "torch 2.13.0+cpu, a CPU build: 2 packages, downloads of 1.0 GB", "cpu"),
        ("CUDA", "CUDA", {}, "torch 2.13.0, a CUDA build: 4 packages, downloads of 2.0 GB", ""),
        ("CUDA", "CPU", {"GPU": "1"}, "torch 2.13.0, a CUDA build: 4 packages, downloads of 2.0 GB", ""),
        ("CPU", "", {}, "torch 2.13.0+cpu, a CPU build: 2 packages, downloads of 1.0 GB", ""),
        ("", "", {"TORCH_VERSION": "2.14.1"}, "torch 2.14.1", ""),
        # With a driver for CUDA 12 no TORCH_VERSION helped: the usual index has builds for CUDA 13.
        ("", "", {"TORCH_INDEX": "https://download.pytorch.org/whl/cu126"}, "torch 2.13.0", "cu126"),
    ],
    ids=["CUDA build", "no index of torch", "GPU", "CPU build", "no index", "older driver"],
)
def test_where_no_gpu_is_seen_torch_is_a_build_for_the_cpu(tmp_path, usual, of_torch, given, line, index):
    """2.13.0 was said to be one wherever there is no GPU: elsewhere it came with CUDA's libraries, 6 GB on the disk."""
    offered(tmp_path, "CUDA", "2.13.0", "nvidia-cublas", "nvidia-cudnn-cu13", "sympy")
    offered(tmp_path, "CPU", "2.13.0+cpu", "sympy")
    program(
        tmp_path / "python",
        f"""cd {tmp_path}; case "$*" in
            *--dry-run*whl/cpu*) cat "{of_torch}" ;;
            *--dry-run*) cat "{usual}" ;;
            *"-m pip "*) echo "$*" >>pip ;;
            *sys.prefix*) echo "$PWD" ;;
            *downloads.py) exec {sys.executable} "{SCRIPTS}/downloads.py" ;;
            *"import torch"*) exit 1 ;;
        esac""",
    )
    script = 'set -euo pipefail; . training_scripts/setup.sh; gpu_devices() { [ -n "${GPU:-}" ]; }; setup'
    done = shell(script, tmp_path, **given)
    assert done.returncode == 0, done.stderr
    assert f"setup: {line}\n" in done.stdout
    # An upgrade, since 2.13.0+cu126 is newer for pip than a 2.13.0 that is there.
    source = f"--upgrade --extra-index-url https://download.pytorch.org/whl/{index} " if index else ""
    told = [line for line in (tmp_path / "pip").read_text().splitlines() if "torch==" in line]
    assert told == [f"-m pip install --quiet {source}torch=={given.get('TORCH_VERSION', '2.13.0')}"]


@pytest.mark.process
@pytest.mark.parametrize("asked, used", [("", ".venv"), ("1", "conda")])
def test_an_active_environment_is_left_alone_unless_asked(tmp_path, asked, used):
    """conda's base, which every shell of its users has active, got torch and DeepSpeed without a word."""
    for name in (".venv", "conda"):
        (tmp_path / name / "bin").mkdir(parents=True)
        told = f'case "$*" in *"-m pip "*) echo "$*" >>"{tmp_path}/{name}/pip" ;; *sys.prefix*) echo "{name}" ;; esac'
        program(tmp_path / name / "bin/python", told)
    (tmp_path / ".venv/bin/activate").write_text("VIRTUAL_ENV=$PWD/.venv PATH=$PWD/.venv/bin:$PATH\n")
    (tmp_path / "setup.py").touch()
    conda = {"CONDA_PREFIX": str(tmp_path / "conda"), "VIRTUAL_ENV": "", "SETUP_INTO_ACTIVE": asked}
    script = f"set -euo pipefail; . {SCRIPTS}/setup.sh; setup"
    done = shell(script, tmp_path / "conda/bin", tmp_path, **conda)
    assert done.returncode == 0, done.stderr
    assert [name for name in (".venv", "conda") if (tmp_path / name / "pip").exists()] == [used]
    instead = "" if asked else f", not the active environment {tmp_path}/conda (SETUP_INTO_ACTIVE=1 would)"
    assert done.stdout.startswith(f"setup: using {used}{instead}\n")


@pytest.mark.process
def test_other_systems_are_one_line(tmp_path):
    program(tmp_path / "uname", "echo Darwin")
    done = shell(". training_scripts/setup.sh; setup", tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1) and "needs Linux" in done.stderr
    program_start = "import runpy, sys; sys.platform = 'darwin'; runpy.run_module('hybrid_grpo', run_name='__main__')"
    done = shell(f'{sys.executable} -c "{program_start}" train', tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "error: this is darwin" in done.stderr


LAUNCH = 'compgen() { case "$*" in *nvidia*) echo /dev/nvidia0 ;; esac; }; . training_scripts/launch.sh; launch train'
FOUND = 'case "$*" in *device_count*) echo {} ;; *socket*) echo 29500 ;; esac'
"""`python`, asked for the GPUs that torch sees and for a free port."""


@pytest.mark.process
def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(tmp_path):
    program(tmp_path / "python", 'case "$*" in *device_count*) echo 0 ;; *) echo "$DS_ACCELERATOR: $*" ;; esac')
    refused = shell(LAUNCH, tmp_path)
    assert refused.returncode == 1 and "train" not in refused.stdout
    assert "has GPUs that torch cannot use" in refused.stderr and refused.stderr.count("\n") == 1
    for wish in ({"DS_ACCELERATOR": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}):
        assert shell(LAUNCH, tmp_path, **wish).stdout == "cpu: -m hybrid_grpo.run.local_ranks 2 train\n", wish


@pytest.mark.process
def test_the_launcher_takes_the_gpus_that_are_visible(tmp_path):
    """Given a number of GPUs, DeepSpeed's launcher ignores CUDA_VISIBLE_DEVICES and takes the first ones. And GPUS was
    ignored where CUDA_VISIBLE_DEVICES was set: GPUS=2 with four visible GPUs started four ranks."""
    program(tmp_path / "python", FOUND.format(4))
    program(tmp_path / "deepspeed", 'echo "$* on $CUDA_VISIBLE_DEVICES"')
    port, rest = "--master_port 29500", "--no_local_rank --module hybrid_grpo train"
    for wish, options, taken in (
        ({}, f"--num_gpus 4 {port}", ""),
        ({"GPUS": "1"}, f"--num_gpus 1 {port}", ""),
        ({"CUDA_VISIBLE_DEVICES": "7,5,2,3"}, port, "7,5,2,3"),
        ({"GPUS": "2", "CUDA_VISIBLE_DEVICES": "7,5,2,3"}, port, "7,5"),
        ({"GPUS": "3", "ROWS": "64"}, f"--num_gpus 3 {port}", ""),
        ({"ROWS": "62"}, f"--num_gpus 2 {port}", ""),
        ({"ROWS": "62", "CUDA_VISIBLE_DEVICES": "7,5,2,3"}, port, "7,5"),
        ({"GPUS": "8", "CUDA_VISIBLE_DEVICES": "2,3", "LAUNCHER": "--hostfile hosts"}, "--hostfile hosts", "2,3"),
    ):
        assert shell(LAUNCH, tmp_path, **wish).stdout == f"--quiet {options} {rest} on {taken}\n", wish
    for many in ("5", "0", "two"):
        refused = shell(LAUNCH, tmp_path, GPUS=many, CUDA_VISIBLE_DEVICES="7,5,2,3")
        assert refused.returncode == 2 and not refused.stdout and refused.stderr.count("\n") == 1
        assert f"launch: GPUS {many} must be a whole number of 1 to 4, the number of visible GPUs: " in refused.stderr
    # With 3, 5, 6 or 7 GPUs the quickstart ended with `sft.batch_size 64 does not divide`.
    quickstart = (SCRIPTS / "quickstart.sh").read_text()
    for recipe in ("letters_sft", "letters", "quickstart"):
        rows = re.search(r"(?:batch_size|prompts_per_step): (\d+)", (SCRIPTS / f"{recipe}.yaml").read_text())
        assert rows and f"export ROWS={rows[1]} " in quickstart


def test_the_same_without_the_launcher(monkeypatch):
    monkeypatch.setattr(hardware, "Path", lambda _: SimpleNamespace(glob=lambda _: ["nvidia0", "nvidia1"]))
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"has 2 GPUs that torch cannot use: torch .* set DS_ACCELERATOR=cpu"):
        hardware.refuse_idle_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hardware.refuse_idle_gpus()


@pytest.fixture
def gpus(monkeypatch):
    """Starts a rank where so many GPUs are visible; returns the GPU it takes, its threads and its allocator."""
    names = ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    names = (*names, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_NCCL_PROPAGATE_ERROR")
    for name in (*names, "LOCAL_RANK", "RANK"):
        monkeypatch.setenv(name, "")  # so that what a start sets is taken back
    cores = {"own": set(range(64)), "launcher": set(range(64))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores["own" if pid == 0 else "launcher"])
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    def start(count, own=64, **environment):
        torch._C._accelerator_setAllocatorSettings("")
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in {"LOCAL_RANK": "0", **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RANK", os.environ["LOCAL_RANK"])
        cores["own"], taken = set(range(own)), []
        threads.clear()
        hardware.take_gpu(SimpleNamespace(device_count=lambda: count, set_device=taken.append))
        assert os.environ["LOCAL_RANK"] == str(taken[0])
        return taken[0], threads[0] if threads else None, hardware.allocator_fact(torch.device("cuda"))["allocator"]

    yield start
    torch._C._accelerator_setAllocatorSettings("")


def test_a_rank_takes_its_gpu_or_the_one_that_it_was_given(gpus, monkeypatch):
    """Slurm shows each task its own GPU as number 0; LOCAL_RANK 3 was an invalid ordinal, with a traceback."""
    assert gpus(8, LOCAL_RANK="3")[0] == 3
    assert gpus(1, LOCAL_RANK="3", CUDA_VISIBLE_DEVICES="3")[0] == 0
    for count, shown in ((1, {}), (2, {"CUDA_VISIBLE_DEVICES": "0,1"})):
        with pytest.raises(UserError, match=f"rank 3 is number 3 on its machine, where torch sees {count} GPUs: start"):
            gpus(count, LOCAL_RANK="3", **shown)
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")  # as in torch 2.11
    assert hardware.allocator_fact(torch.device("cuda")) == {}


def test_a_rank_takes_its_share_of_the_cores(gpus):
    """Eight ranks that step Adam in host memory took all cores each; under torchrun they had one thread."""
    assert gpus(8, LOCAL_SIZE="8")[1] == 8
    assert gpus(8, LOCAL_WORLD_SIZE="8", TORCHELASTIC_RUN_ID="x", OMP_NUM_THREADS="1")[1] == 8
    assert os.environ["OMP_NUM_THREADS"] == "8"
    assert gpus(8, LOCAL_WORLD_SIZE="8", own=12)[1] == 12, "bound by whoever started it, as by srun"
    assert gpus(8, LOCAL_SIZE="8", OMP_NUM_THREADS="3")[1] is None
    assert gpus(1)[1] == 64


@pytest.mark.process
def test_every_way_of_launching_sets_the_allocator_and_nccl(gpus, tmp_path):
    """The variable was set after torch had read it, at its import, so that memory was not in expandable segments."""
    program(tmp_path / "python", FOUND.format(1))
    program(tmp_path / "deepspeed", 'echo "$PYTORCH_ALLOC_CONF"')
    assert shell(LAUNCH, tmp_path).stdout == "expandable_segments:True\n" and gpus(1)[2] == "expandable_segments:True"
    assert os.environ["TORCH_NCCL_PROPAGATE_ERROR"] == "1", "a rank lost on another machine was seen by some ranks only"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        assert gpus(1, **{name: "backend:native"})[2] == "default", "the user's own, which torch has read"
        assert "expandable" not in shell(LAUNCH, tmp_path, **{name: "backend:native"}).stdout


@pytest.fixture
def capturing(monkeypatch):
    """torch's own torch.cuda.graph around a graph that fails where the test says; the log of streams."""
    seen = SimpleNamespace(fails="", stream="rank's", log=[], free=1 << 30)

    class Graph:
        replay = None

        def capture_begin(self, pool, *, capture_error_mode, **_):
            seen.log.append((pool, capture_error_mode))
            if seen.fails == "begin":
                raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")

        def capture_end(self):
            if seen.fails == "end":
                raise RuntimeError("cudaErrorStreamCaptureInvalidated")

    class Side:
        def __enter__(self):
            seen.before, seen.stream = seen.stream, "side"

        def __exit__(self, *_):
            seen.stream = seen.before

    monkeypatch.setattr(torch.cuda.graphs.graph, "default_capture_stream", "side")
    monkeypatch.setattr(torch.cuda, "stream", lambda _: Side())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: seen.stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(seen, "stream", stream))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (seen.free, 24 << 30))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda *_: None, raising=False)
    return seen


@pytest.mark.parametrize("fails", ["", "begin", "end"])
def test_a_capture_leaves_the_stream_as_it_was(capturing, fails):
    capturing.fails = fails
    if fails:
        with pytest.raises(RuntimeError):
            graphs.on_cuda(lambda: torch.zeros(1), "pool")
    else:
        graphs.on_cuda(lambda: torch.zeros(1), "pool")
    assert capturing.stream == "rank's" and capturing.log == [("pool", "thread_local")]


def test_nothing_is_captured_where_too_little_memory_is_free(capturing):
    """A capture that runs out of memory cannot be survived before torch 2.13."""
    capturing.free = 100 << 20
    with pytest.raises(RuntimeError, match="100 MiB are free"):
        graphs.on_cuda(lambda: torch.zeros(1), "pool")
    assert capturing.log == []


def test_memory_of_graphs_does_not_count_as_free_for_the_cache(monkeypatch):
    def segment(pool, total, allocated, device=0):
        return {"segment_pool_id": pool, "total_size": total, "allocated_size": allocated, "device": device}

    held = [segment((0, 0), 500, 100), segment((0, 7), 3000, 0), segment((0, 0), 900, 0, device=1)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 8000))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: held)
    # A margin of 3 % of the whole memory stays free.
    assert cache.free_bytes(torch.device("cuda", 0)) == 1000 + 400 - 240


@pytest.mark.process
def test_the_engine_needs_no_compiler_for_kernels_that_it_never_uses(tmp_path, monkeypatch):
    """DeepSpeed's hybrid engine makes the memory of its inference kernels, which compiles nine files with nvcc. It also
    linked a program with libaio, which printed `cannot find -laio`, and warned in every process that it takes a CPU;
    and its timer of throughput would wait for the GPU in every forward from the third step on."""
    code = """
import os
import deepspeed.accelerator.real_accelerator as real, deepspeed.runtime.hybrid_engine as hybrid, torch
from deepspeed.ops.op_builder.builder import OpBuilder
OpBuilder.has_function = lambda *_, **__: print("linked a program")
from deepspeed.ops.transformer.inference.op_binding import base
def missing(*_, **__):
    raise RuntimeError("CUDA_HOME does not exist, unable to compile CUDA op(s)")
base.BaseOp.__init__ = missing
from hybrid_grpo import engine
real.ds_accelerator = os.environ.pop("DS_ACCELERATOR", None) and None
engine.start()
model = torch.nn.Linear(4, 4)
from hybrid_grpo.config import EngineConfig, PolicyConfig
config = engine.policy_config(PolicyConfig(dtype="float32"), EngineConfig(zero_stage=0))
built = engine.Engine(model, model, torch.nn.Linear(4, 4, device="meta"), config)
assert type(built.engine) is hybrid.DeepSpeedHybridEngine
real.get_accelerator().synchronize = lambda *_: print("waited")
for _ in range(3):
    built.backward(built(torch.ones(2, 4)).sum())
    built.step(1e-2)
print("built")
"""
    (tmp_path / "program.py").write_text(code)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    done = forks.run(tmp_path / "program.py")
    assert done.out == "built\n", done.err[-2000:]


@pytest.mark.parametrize("offload_optimizer", [False, True])
def test_the_optimizer_is_fused(offload_optimizer):
    """torch's default, `foreach`, reads and writes everything several times."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    from hybrid_grpo import engine as engines

    engine = EngineConfig(offload_optimizer=offload_optimizer)
    given = dict(engines.policy_config(PolicyConfig(weight_decay=0.1), engine)["optimizer"]["params"])
    double = SimpleNamespace(
        zero_use_cpu_optimizer=lambda: offload_optimizer, zenflow=False, bf16_optimizer_states=lambda: False
    )
    kind, more = DeepSpeedEngine.get_optimizer_configuration(double, given, True)
    (group,) = kind([torch.zeros(3)], **given, **more).param_groups
    assert kind is torch.optim.AdamW
    assert (group["fused"], group["foreach"], group["lr"], group["weight_decay"]) == (True, None, 1e-6, 0.1)
