"""The command line itself, as a process."""

import os
import signal
import subprocess
import sys
import time

import pytest
from launching import make_task

from hybrid_grpo import __main__ as program

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
