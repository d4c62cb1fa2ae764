"""The notebook of examples/ in a real kernel: run twice, stopped, and begun again, with nothing left over."""

import json
import os
import re
import subprocess
import sys

import pytest
from jupyter_client.manager import start_new_kernel
from paths import ROOT

pytestmark = pytest.mark.process


class Kernel:
    """A notebook's kernel, which executes cells and returns what they show."""

    def __init__(self, folder):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        self.manager, self.client = start_new_kernel(cwd=str(folder), env=environment)

    def run(self, code, stop_at=None):
        """Execute a cell, and press stop when it shows what `stop_at` matches; returns its outputs' contents."""
        asked, shown = self.client.execute(code), []
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return shown
            shown.append((kind, content))
            if stop_at and kind == "update_display_data" and re.search(stop_at, content["data"]["text/html"]):
                self.manager.interrupt_kernel()
                stop_at = None

    def value(self, code):
        return next(content["data"]["text/plain"] for kind, content in self.run(code) if kind == "execute_result")

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    program = [sys.executable, str(ROOT / "training_scripts/lookup_task.py"), str(folder / "chat")]
    subprocess.run(program, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    kernel = Kernel(folder)
    kernel.folder = folder
    yield kernel
    kernel.close()


CELL = "".join(json.loads((ROOT / "examples/quickstart.ipynb").read_text(encoding="utf-8"))["cells"][1]["source"])


def of(kind, shown):
    return [content for each, content in shown if each == kind]


def test_the_notebook_runs_twice_and_is_stopped_and_begun_again_in_one_kernel(kernel):
    short = CELL.replace('"steps": 60', '"steps": 3').replace("HuggingFaceTB/SmolLM2-135M-Instruct", "chat/model")
    assert short != CELL
    for number in (1, 2):
        shown = kernel.run(f"{short}\nrun")
        assert not of("error", shown), shown[-1]
        assert 'max="3" value="3"' in of("update_display_data", shown)[-1]["data"]["text/html"]
        [result] = of("execute_result", shown)
        assert "<table>" in result["data"]["text/html"] and "<svg" in result["data"]["text/html"]
        assert len(list((kernel.folder / "runs").glob("train-*"))) == number

    long = short.replace('"steps": 3', '"steps": 100_000, "name": "long"')
    shown = kernel.run(long, stop_at=r" step [2-9]/")
    [stopped] = of("error", shown)
    assert stopped["ename"] == "RunInterrupted"
    [line] = stopped["traceback"]
    assert "\n" not in line and "--" not in line and 'run={"resume": "auto"}' in line
    assert "default_int_handler" in kernel.value("import signal; signal.getsignal(signal.SIGINT)")

    done = int(re.search(r"after step (\d+)", line)[1])
    again = long.replace("100_000", str(done + 1)).replace('"long"', '"long", "resume": "auto"')
    assert not of("error", kernel.run(again))
    assert kernel.value("run.metrics.step.tolist()") == str([*range(done + 2)]), "0 is the evaluation before all"
    alive = "import threading; sum(t.name != 'MainThread' and not t.daemon for t in threading.enumerate())"
    assert kernel.value(alive) == "0"
