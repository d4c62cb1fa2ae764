"""The page draws, in a browser. Skipped where there is no playwright or no Chromium, whose path may be in CHROMIUM."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import uvicorn

from hybrid_grpo.records.alarm_records import AlarmRecord, write_alarm
from hybrid_grpo.watch import server
from hybrid_grpo.watch.folders import Folders
from hybrid_grpo.watch.frozen import write_report

playwright = pytest.importorskip("playwright.sync_api")
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
VIEWS = {"curves": ".chart .u-over", "samples": ".rows .sample", "step": "#step .stage", "settings": ".config"}
"""The views of the page, and an element that shows that each is drawn."""

pytestmark = [pytest.mark.process, pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")]


def numbers(rise: float) -> list[dict[str, float]]:
    return [
        {
            "step": step, "reward/mean": rise * step / 60, "reward/std": 0.1, "time/step_s": 60.0,
            "policy/entropy": 1.0 - step / 100, "time/generate_s": 30.0,
            **({"eval/heldout/accuracy": step / 60} if step % 20 == 0 else {}),
        }
        for step in range(61)
    ]  # fmt: skip


@pytest.fixture
def runs(make_run: Any) -> list[Path]:
    row = {"group": 0, "sample": 0, "prompt_id": 0, "prompt": [{"role": "user", "content": "What?"}], "reward": 0.5}
    row |= {"rewards": {"f": 0.5}, "advantage": 0.1, "length": 9, "finish": "stop", "columns": {"answer": "42"}}
    row |= {"completion": "<img src=x onerror=alert(1)> the answer is 42"}
    slow = make_run("slow", numbers(1.0), "policy: {lr: 0.1}", {step: [{**row, "step": step}] for step in (1, 60)})
    tokens = {"token_ids": [[7, 8]], "pieces": [["the", " answer"]], "logp": [[-0.123456789, -2.5]]}
    tokens |= {"row": [0], "prompt_index": [0], "sample": [0], "advantage": [[0.1, -0.1]]}
    pyarrow.parquet.write_table(pyarrow.table(tokens), slow / "rollouts" / "step_000060.parquet")
    trace = {"step": 60, "stages": [[["generate", 0.0, 1.2]], [["generate", 0.0, 3.0]]]}
    (slow / "details.jsonl").write_text(json.dumps(trace) + "\n")
    write_alarm(slow, AlarmRecord(30, "parity", 30, "sampler and training forward differ by 0.2000 nats"))
    return [slow, make_run("fast", numbers(2.0), "policy: {lr: 0.2}")]


@pytest.fixture
def url(runs: list[Path]) -> Iterator[str]:
    listener = server.listen(0)
    app = server.application(Folders([runs[0].parent]))
    running = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    thread = threading.Thread(target=running.run, args=([listener],))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    running.should_exit = True
    thread.join()


@contextmanager
def page(width: int = 1280) -> Iterator[tuple[Any, list[str]]]:
    """A page of the browser, and what it complains of."""
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 860}, reduced_motion="reduce")
        complaints: list[str] = []
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        yield tab, complaints
        browser.close()


def test_charts_samples_and_a_step_are_drawn(url: str) -> None:
    with page() as (tab, complaints):
        tab.goto(f"{url}/#run=slow&run=fast")
        tab.locator(".chart canvas").nth(2).wait_for()
        assert tab.locator("#overview").inner_text().split("\n")[0].split("\t")[:2] == ["Run", "policy.lr"]
        assert "sampler and training forward differ by 0.2000 nats" in tab.locator("#alarms").inner_text()
        tab.locator(".chart", has_text="Reward").first.focus()
        tab.keyboard.press("ArrowLeft")
        assert "step 59" in tab.locator(".tip:visible").inner_text()
        tab.locator("[data-view=samples]").click()
        tab.locator(".rows .sample").first.click()
        tab.locator(".detail .tokens .token").first.wait_for()
        assert "<img src=x onerror=alert(1)> the answer is 42" in tab.locator("#samples").inner_text()
        tab.locator("[data-view=step]").click()
        tab.locator("#step .stage").first.wait_for()
        assert "Rank 1 is 1.8 s slower than the median in generate." in tab.locator("#step").inner_text()
        assert complaints == []


@pytest.mark.parametrize("is_frozen", [False, True])
def test_no_view_is_wider_than_a_phone(url: str, runs: list[Path], is_frozen: bool) -> None:
    with page(width=390) as (tab, complaints):
        tab.goto(write_report(runs[0]).as_uri() if is_frozen else f"{url}/#run=slow")
        for view, drawn in VIEWS.items():
            tab.locator(f"[data-view={view}]").click()
            tab.locator(drawn).first.wait_for()
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        assert complaints == []
