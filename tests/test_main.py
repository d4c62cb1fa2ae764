"""The command line itself, as a process."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from launching import make_task

from hybrid_grpo import __main__ as program
from hybrid_grpo.config.errors import RunStopped, UserError
from hybrid_grpo.run.stopping.status import own_status

pytestmark = pytest.mark.process


def test_ctrl_c_at_any_moment_of_a_start_is_one_line_at_most(tmp_path):
    """It had been 29 to 88 lines of traceback, with one exception raised while another was handled."""
    folder = make_task(tmp_path)
    settings = ["--policy.model=model", "--data.path=words.jsonl"]
    (folder / "words.jsonl").write_text('{"prompt": "dcab="}\n')
    # Not before Python itself has begun, which would say so at length.
    begin = (
        "import runpy; print('up', flush=True); runpy.run_module('hybrid_grpo', run_name='__main__', alter_sys=True)"
    )
    for seconds in (0.7, 1.2, 2.0):
        for command in ("generate", "plan"):
            process = subprocess.Popen(
                [sys.executable, "-c", begin, command, *settings, "--rollout.max_completion_tokens=60"],
                cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert process.stdout and process.stdout.readline() == "up\n"
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            assert "Traceback" not in errors and len(errors.splitlines()) <= 2, errors
            assert process.returncode in (0, 2, -signal.SIGINT, 128 + signal.SIGINT)


def test_a_step_is_made_without_what_takes_seconds_to_import(tmp_path):
    """DeepSpeed imports torch's compiler for an optimizer that is not used, and JSONL needs no `datasets`: together
    with a kernel for GPUs they took a third of a start."""
    folder = make_task(tmp_path)
    program = "import sys; from hybrid_grpo.__main__ import main; print(main(sys.argv[1:]), *sys.modules)"
    settings = ["--policy.model=model", "--policy.dtype=float32", "--data.path=train.jsonl", "--rewards=[exact_match]"]
    settings += ["--rollout.prompts_per_step=2", "--rollout.num_generations=2", "--rollout.max_completion_tokens=8"]
    command = [sys.executable, "-c", program, "train", *settings, "--run.steps=1", "--log.wandb=disabled"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert "step 1/1" in done.stdout, done.stderr
    status, *modules = done.stdout.splitlines()[-1].split()
    slow = {"datasets", "peft", "torch._inductor.compile_fx", "torch.nn.attention.varlen", "wandb"}
    assert status == "0" and "torch" in modules and not slow & set(modules)


@pytest.mark.parametrize(("is_terminal", "no_color", "off"), [(True, "", False), (True, "1", True), (False, "", True)])
def test_libraries_draw_bars_on_a_terminal_with_colors_only(monkeypatch, is_terminal, no_color, off):
    """`datasets` drew them in log files too, with a carriage return for every step."""
    ended = []
    monkeypatch.setattr(program, "main", lambda: 0)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["hybrid-grpo", "generate"])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TQDM_DISABLE", "x")
    monkeypatch.delenv("TQDM_DISABLE")
    program.entry()
    assert ended == [0] and ("TQDM_DISABLE" in os.environ) == off


@pytest.mark.parametrize("end", [lambda: 0, lambda: 1 / 0, lambda: program._interrupted(2, None)])
def test_nothing_of_the_memory_that_ranks_share_stays_however_a_command_ends(monkeypatch, end):
    """A traceback or Ctrl-C left its file in /dev/shm."""
    files = []

    def main():
        files.append(own_status().path)
        assert files[0].exists()
        return end()

    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(os.getpid())}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(program, "main", main)
    monkeypatch.setattr(os, "_exit", Mock(side_effect=SystemExit))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["hybrid-grpo", "generate"])
    with pytest.raises((SystemExit, ZeroDivisionError)):
        program.entry()
    assert not files[0].exists()


@pytest.mark.parametrize(("error", "where"), [(UserError, " [rank 1]"), (RunStopped, "")])
def test_a_rank_names_itself_unless_all_stop_alike(monkeypatch, capsys, error, where):
    """Whichever is first prints what all say: the line of a full disk had depended on which that was."""
    command = SimpleNamespace(run=Mock(side_effect=error("no")))
    monkeypatch.setattr(program.importlib, "import_module", lambda _: command)
    monkeypatch.setattr(program, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(program, "adopt_rank", lambda: None)
    monkeypatch.setenv("RANK", "1")
    assert program.main(["plan"]) == 2
    assert capsys.readouterr().err == f"hybrid-grpo{where}: error: no\n"
