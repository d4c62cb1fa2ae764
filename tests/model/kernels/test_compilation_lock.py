"""Compiling under a lock that dies with its owner."""

import os
import subprocess
import sys
import threading

import pytest

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.model.kernels import compilation_lock as module
from hybrid_grpo.model.kernels.compilation_lock import compilation_lock


@pytest.fixture
def kernels_of(tmp_path, monkeypatch):
    """The lock of torch for a kernel that somebody compiles."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py311_cpu" / "a_kernel" / "lock"
    lock.parent.mkdir(parents=True)
    return lock


@pytest.mark.parametrize("left_by", ["a process of ours", "another program, long ago"])
def test_a_lock_of_a_killed_compiler_is_not_waited_for(kernels_of, tmp_path, monkeypatch, left_by):
    """torch would wait for ever."""
    monkeypatch.setattr(module, "_LEAVES_LOCKS", True)
    kernels_of.touch()
    if left_by == "a process of ours":
        (tmp_path / "a_kernel.owner").write_text("12345")
    else:
        os.utime(kernels_of, (0, 0))
    with compilation_lock("a_kernel"):
        assert not kernels_of.exists()
    assert not (tmp_path / "a_kernel.owner").read_text()


def test_a_lock_file_of_a_torch_that_never_removes_it_is_not_waited_for(kernels_of, monkeypatch):
    """After its first start with torch 2.15, the next ones waited for ten minutes."""
    monkeypatch.setattr(module, "_LEAVES_LOCKS", False)
    kernels_of.touch()
    with compilation_lock("a_kernel"):
        assert kernels_of.exists()


@pytest.mark.process
def test_a_compiler_at_work_is_waited_for_and_only_by_those_who_need_its_kernel(kernels_of):
    """A start of a run once waited for every kernel that anybody compiled: four minutes, for one that it never used."""
    code = f"""
import sys, time
from pathlib import Path
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.model.kernels.compilation_lock import compilation_lock
with compilation_lock("a_kernel"):
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


def test_compiling_is_announced_and_a_program_that_is_no_compiler_is_one_line(kernels_of, monkeypatch, capsys):
    """CXX=/bin/false had been 30 lines of traceback, and the first start silent for a minute and a half."""
    monkeypatch.setenv("CXX", "/bin/false")
    wrong = pytest.raises(UserError, match=r"/bin/false is not a C\+\+ compiler that works: install one")
    with wrong, compilation_lock("a_kernel"):
        raise subprocess.CalledProcessError(1, ["/bin/false", "--version"])
    assert "compiling DeepSpeed's kernel a_kernel, once" in capsys.readouterr().out
    with compilation_lock("a_kernel"):
        pass
    assert "compiled a_kernel in 0 s" in capsys.readouterr().out
    (kernels_of.parent / "a_kernel.so").touch()
    with compilation_lock("a_kernel"):
        pass
    assert capsys.readouterr().out == ""
