"""Hostile programs (sandbox_programs.py), run as each kind of user that this machine has."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sandbox_programs
from paths import ROOT
from reward_helpers import in_time
from sandbox_programs import PROGRAMS, TIMEOUT_S

from hybrid_grpo.rewards.code.containment import PROTECTIONS, Limits
from hybrid_grpo.rewards.code.sandbox import Sandbox

pytestmark = pytest.mark.process

NOBODY = 54321
SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin")
ENDS = {
    "fork bomb": {"timeout", "exited"}, "memory": {"exited", "timeout"},
    "loop": {"timeout"}, "sleep": {"timeout"}, "deaf": {"timeout"},
    "daemon": {"timeout"}, "stop": {"timeout"}, "recursion": {"timeout", "exited", "SIGSEGV"},
    "recursion in C": {"timeout", "exited", "SIGSEGV"}, "big number": {"timeout", "exited"}, "regex": {"timeout"},
    "crash": {"SIGSEGV"}, "files closed": {"timeout"},
}  # fmt: skip
"""How the programs end; the others exit by themselves."""


@contextlib.contextmanager
def shared_folder(user: int | None) -> Iterator[Path]:
    """A folder that this user can reach and write to."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        if user:
            os.chown(folder, user, user)
        yield Path(folder)


def battery(python: str, user: int | None, *without: str, only: str = "") -> list[dict]:
    with shared_folder(user) as folder, shared_folder(None) as tree:
        program = Path(sandbox_programs.__file__)
        if user:  # who may have no way into the folder of this clone, such as one in a home directory of mode 700
            program = tree / program.relative_to(ROOT)
            for name in ("hybrid_grpo", "tests/support"):
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        command = [python, "-B", str(program), str(folder), *without]
        as_user = {"user": user, "group": user, "extra_groups": []} if user else {}
        environment = {"PATH": "/usr/bin:/bin"} | ({"ONLY": only} if only else {})
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, **as_user)
        assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def users() -> dict[str, tuple[str, int | None]]:
    """Root that stays root where Python is its own, root that becomes another user, and a user without rights."""
    found: dict[str, tuple[str, int | None]] = {"own": (sys.executable, None)}
    if os.getuid() == 0 and SYSTEM_PYTHON:
        found |= {"root": (SYSTEM_PYTHON, None), "nobody": (SYSTEM_PYTHON, NOBODY)}
    return found


@pytest.fixture(scope="module", params=users())
def outcome(request: pytest.FixtureRequest) -> dict[str, dict]:
    """By program; under "" the first line."""
    return {line.get("program", ""): line for line in battery(*users()[request.param])}


@pytest.mark.parametrize("program", PROGRAMS)
def test_contained(outcome: dict[str, dict], program: str) -> None:
    result = outcome[program]
    assert not result["escaped"], result["stdout"]
    assert result["left"] == [] and not result["heard"] and result["written"] == []
    assert result["bystander"] and result["intact"]
    assert result["wall_s"] < TIMEOUT_S + 20
    assert result["end"] in ENDS.get(program, {"exited"}), result
    assert result["next"] == "fine\n", "whatever it did, the next one runs"


def test_the_protections_are_in_force(outcome: dict[str, dict]) -> None:
    assert set(outcome[""]["protections"]) == set(PROTECTIONS)
    assert "refused home" in outcome["read home"]["stdout"] and "fine" in outcome["import"]["stdout"]


@pytest.mark.skipif(os.getuid() != 0 or not SYSTEM_PYTHON, reason="needs root, and a Python that others can read")
def test_root_becomes_a_user_of_its_own() -> None:
    assert battery(str(SYSTEM_PYTHON), None, only="exit")[0]["protections"]["privileges"].startswith("user ")


def test_without_seccomp_what_a_program_leaves_behind_is_still_killed() -> None:
    first, daemon = battery(sys.executable, None, "seccomp", only="daemon")
    assert {"network", "processes"}.isdisjoint(first["protections"])
    assert "escaped fork" in daemon["stdout"] and "escaped session" in daemon["stdout"]
    assert daemon["left"] == [] and daemon["wall_s"] < TIMEOUT_S + 20


def test_without_landlock_nothing_can_be_written() -> None:
    with Sandbox(without=["landlock"]) as sandbox:
        assert "reads" not in sandbox.protections and "writes" in sandbox.protections
        assert "NOT IN FORCE: reads" in sandbox.describe()
        run = sandbox.run("import os, tempfile\nprint(os.getcwd())\nopen('/dev/shm/escaped', 'w')")
        assert (run.stdout, run.status) == ("/\n", 1) and "PermissionError" in run.stderr
        with pytest.raises(ValueError, match=r"require reads: this machine cannot promise .* Landlock"):
            sandbox.require(["writes", "reads"])
        with pytest.raises(ValueError, match="there are reads, writes, network"):
            sandbox.require(["netwerk"])


def test_programs_run_as_they_do_elsewhere() -> None:
    with Sandbox() as sandbox:
        sandbox.require(PROTECTIONS)
        assert sandbox.run("print(input()[::-1])", "abc\n").stdout == "cba\n"
        assert sandbox.run("import sys; sys.exit(3)").status == 3
        assert sandbox.run("raise SystemExit('why')").stderr == "why"
        assert sandbox.run("print('é \\ud800 \U0001f389')").stdout == "é \\ud800 \U0001f389\n"
        assert "ZeroDivisionError" in sandbox.run("if __name__ == '__main__': 1 / 0").stderr
        assert "SyntaxError" in sandbox.run("def").stderr
        assert sandbox.run("import os; print('a', file=open(os.devnull, 'w'))").status == 0
        assert sandbox.run("import asyncio\nasync def f(): print(1)\nasyncio.run(f())").stdout == "1\n"
        assert len(sandbox.run("print('x' * 9999)", limits=Limits(output_kb=1)).stdout) == 1024
        # The same program, the same output: hashes and random numbers too.
        source = "import random; print(hash('a'), random.random(), list({'a', 'b', 'c'}))"
        with Sandbox() as other:
            assert len({box.run(source).stdout for box in (sandbox, sandbox, other)}) == 1


def test_a_program_ends_with_whoever_started_it() -> None:
    """Killed workers close nothing by themselves: the kernel does, and the template takes it from there."""
    starter = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from hybrid_grpo.rewards.code.sandbox import Limits, Sandbox\n"
        f"sandbox = Sandbox(['starter-{os.getpid()}'])\n"
        "print(sandbox._process.pid, flush=True)\n"
        "sandbox.run('while True: pass', limits=Limits(timeout_s=60.0))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    assert in_time(lambda: len(_marked()) == 2)  # the template and the program
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert in_time(lambda: _marked() == [])


def test_a_killed_template_takes_the_program_along_and_is_reported() -> None:
    with Sandbox([f"starter-{os.getpid()}"]) as sandbox:
        template = sandbox._process.pid
        killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {template}"])
        with pytest.raises(RuntimeError, match="the sandbox has ended"):
            sandbox.run("while True: pass", limits=Limits(timeout_s=60.0))
        killer.wait()
        assert not sandbox.usable
        assert in_time(lambda: _marked() == [])


def _marked() -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if place.read_bytes().endswith(f"starter-{os.getpid()}\0".encode()):
                found.append(place.parent.name)
    return found
