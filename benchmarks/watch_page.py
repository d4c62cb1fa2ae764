"""The page of `hybrid-grpo watch` in a browser: how soon a large run is open, how soon a new step is shown, pictures.

    python benchmarks/watch_page.py                                    a synthetic run of 100,000 steps, 200 metrics
    python benchmarks/watch_page.py --steps 1000                       the same of another length
    python benchmarks/watch_page.py --pictures docs/pictures RUN RUN   pictures for docs/watch.md of two runs

Needs playwright (`pip install playwright`) and a Chromium, whose path is in CHROMIUM or which is found by its name.
Seconds are from the start of the server, or the end of a step's line, until the page has drawn it; those with `cpu` in
their name are the server's processor time.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
METRICS = 200
SIZES = {"wide": (1280, 860), "phone": (390, 844)}
COPIES_OF_VALUES = 50
"""Lines of numbers that the synthetic run repeats: making each anew would take minutes."""


def browser_path() -> str | None:
    """A Chromium of this machine."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def page(path: str, size: str = "wide", colors: str = "light") -> Iterator[Any]:
    """An empty page of a browser of its own."""
    from playwright.sync_api import sync_playwright

    width, height = SIZES[size]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme=colors, reduced_motion="reduce"
        )
        tab.set_default_timeout(60_000)
        try:
            yield tab
        finally:
            browser.close()


def until(tab: Any, expression: str, seconds: float = 60.0) -> None:
    """Wait until an expression holds in the page, whose own rules allow no script that comes from elsewhere."""
    deadline = time.monotonic() + seconds
    while not tab.evaluate(expression):
        assert time.monotonic() < deadline, f"not within {seconds} s: {expression}"
        time.sleep(0.02)


@contextmanager
def served(*folders: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of a server."""
    command = [sys.executable, "-m", "hybrid_grpo", "watch", *map(str, folders), "--watch.port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield process.stderr.readline().split()[0], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def write_run(folder: Path, steps: int) -> Path:
    """A run of METRICS metrics, those of the catalogue first."""
    from hybrid_grpo.run.catalogue import CATALOGUE

    names = [metric.name for metric in CATALOGUE if "<" not in metric.name]
    names += [f"source/s{number // 2}/{'reward' if number % 2 else 'count'}" for number in range(METRICS - len(names))]
    drawn = random.Random(0)
    bodies = [", ".join(f'"{name}": {drawn.random()}' for name in names) for _ in range(COPIES_OF_VALUES)]
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            file.write(f'{{"step": {step}, {bodies[step % COPIES_OF_VALUES]}}}\n')
    return folder


def measure(steps: int, browser: str) -> dict[str, Any]:
    """Seconds until the first chart is drawn, and until all numbers are read; memory of the server; seconds until a new
    step is shown."""
    with tempfile.TemporaryDirectory() as place:
        run = write_run(Path(place) / "large", steps)
        gigabytes = (run / "metrics.jsonl").stat().st_size / 1e9
        with page(browser) as tab:
            start = time.perf_counter()
            with served(run) as (url, process):
                tab.goto(url)
                tab.wait_for_selector(".chart canvas")
                opened, opened_cpu = time.perf_counter() - start, cpu(process)
                until(tab, "!document.body.innerText.includes('reading,')", 3600)
                exact, exact_cpu = time.perf_counter() - start, cpu(process)
                with (run / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({"step": steps, "reward/mean": 123456.0}) + "\n")
                start = time.perf_counter()
                until(tab, "document.body.innerText.includes('123,456')")
                live = time.perf_counter() - start
                megabytes = process.memory_info().rss / 2**20
    return {
        "steps": steps, "metrics": METRICS, "gigabytes": round(gigabytes, 3), "open_s": round(opened, 2),
        "open_cpu_s": round(opened_cpu, 2), "all_read_s": round(exact, 1), "all_read_cpu_s": round(exact_cpu, 1),
        "new_step_s": round(live, 2), "server_mb": round(megabytes),
    }  # fmt: skip


def cpu(process: psutil.Process) -> float:
    """Seconds of processor time: those of the clock on a machine with nothing else to do."""
    times = process.cpu_times()
    return float(times.user + times.system)


def picture(folder: Path, runs: list[Path], browser: str) -> None:
    """Pictures of the views, in light and dark, wide and on a phone."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = "".join(f"&run={run.name}" for run in runs)
    with served(*runs) as (url, _):
        for name, size, colors, view in (
            ("watch-light", "wide", "light", "curves"),
            ("watch-dark", "wide", "dark", "curves"),
            ("watch-phone", "phone", "light", "curves"),
            ("watch-phone-dark", "phone", "dark", "curves"),
            ("watch-samples", "wide", "light", "samples"),
        ):
            with page(browser, size, colors) as tab:
                tab.goto(f"{url}/#view={view}{chosen}")
                tab.wait_for_selector(".chart canvas" if view == "curves" else ".rows tbody tr")
                tab.wait_for_timeout(1500)
                if view == "samples":
                    tab.fill("[name=most]", "1.9")
                    tab.keyboard.press("Enter")
                    until(tab, "document.querySelector('#samples [role=status]').innerText.includes('found')")
                    tab.locator(".rows tbody tr").nth(3).click()
                    tab.wait_for_selector(".detail pre")
                elif size == "wide":
                    area = tab.locator(".chart .u-over").nth(3).bounding_box()
                    tab.mouse.move(area["x"] + 0.25 * area["width"], area["y"] + 60)
                tab.wait_for_timeout(500)
                tab.screenshot(path=folder / f"{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=re.sub(r"\n +", "\n", __doc__ or ""))
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    options = parser.parse_args()
    browser = browser_path()
    if browser is None:
        sys.exit("there is no Chromium: install one, or give its path in CHROMIUM")
    if options.pictures:
        picture(options.pictures, options.runs, browser)
    else:
        print(json.dumps(measure(options.steps, browser), indent=2))


if __name__ == "__main__":
    main()
