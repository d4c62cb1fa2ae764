"""Compiling under a lock that dies with its owner."""

import subprocess
import sys
import threading

import pytest

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed import compilation_lock as locks
from hybrid_grpo.distributed.compilation_lock import compilation_lock


@pytest.fixture
def kernels_of(tmp_path, monkeypatch):
    """The lock of torch for a kernel that somebody compiles."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "a_kernel" / "lock"
    lock.parent.mkdir(parents=True)
    return lock


def test_a_lock_that_no_process_holds_is_removed(kernels_of, tmp_path):
    """torch 2.13 waits forever for the lock of a killed process, and for one that torch 2.14 left in the folder; this
    lock waited ten minutes for it, and for one of the same name in the folder of another version of Python."""
    other = tmp_path / "py312_cpu" / "a_kernel" / "lock"
    other.parent.mkdir(parents=True)
    for lock in (kernels_of, other):
        lock.touch()
    with compilation_lock("a_kernel"):
        assert not kernels_of.exists() and other.exists()


@pytest.mark.process
@pytest.mark.parametrize("held", ['compilation_lock("a_kernel")', 'Path("{}").open("w")'], ids=["ours", "of torch"])
def test_a_compiler_at_work_is_waited_for_and_only_by_those_who_need_its_kernel(kernels_of, held):
    """A start of a run once waited for every kernel that anybody compiled: four minutes, for one that it never used."""
    code = f"""
import sys, time
from pathlib import Path
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed import compilation_lock as locks
from hybrid_grpo.distributed.compilation_lock import compilation_lock
with {held.format(kernels_of)}:
    Path({str(kernels_of)!r}).touch()
    print("compiling", flush=True)
    sys.stdin.read()
    Path({str(kernels_of)!r}).unlink()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin and other.stdout
        while other.stdout.readline() != "compiling\n":
            assert other.poll() is None
        with compilation_lock("another_kernel"):
            pass
        entered = []
        waiting = threading.Thread(target=lambda: entered.append(compilation_lock("a_kernel").__enter__()))
        waiting.start()
        waiting.join(0.5)
        assert not entered and kernels_of.exists()
        other.stdin.close()
        waiting.join(60)
        assert len(entered) == 1


@pytest.mark.parametrize("seconds, said", [(20, 0), (40, 1)])
def test_waiting_is_announced(monkeypatch, capsys, seconds, said):
    """On a loaded machine a library that is there takes seconds to load, which is not worth a line."""
    now = [0.0]
    monkeypatch.setattr(locks.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(locks.time, "sleep", lambda passed: now.append(now.pop() + passed))
    locks._wait_while(lambda: now[0] < seconds, "adam")
    assert capsys.readouterr().err.count("another process is compiling DeepSpeed's kernel adam: waiting") == said


def test_compiling_is_announced_and_a_program_that_is_no_compiler_is_one_line(kernels_of, monkeypatch, capsys):
    """CXX=/bin/false had been 30 lines of traceback, and the first start silent for a minute and a half."""
    monkeypatch.setenv("CXX", "/bin/false")
    wrong = pytest.raises(UserError, match=r"cannot be compiled by /bin/false: .* install a compiler")
    with wrong, compilation_lock("a_kernel"):
        raise subprocess.CalledProcessError(1, ["/bin/false", "--version"])
    assert "compiling DeepSpeed's kernel a_kernel, once" in capsys.readouterr().err
    with compilation_lock("a_kernel"):
        pass
    assert "compiled a_kernel in 0 s" in capsys.readouterr().err
    (kernels_of.parent / "a_kernel.so").touch()
    with compilation_lock("a_kernel"):
        pass
    assert capsys.readouterr() == ("", "")
