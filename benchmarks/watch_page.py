"""The page of `hybrid-grpo watch` in a browser: how fast a large run opens, how fast a new step is shown, pictures.

    python benchmarks/watch_page.py                                    a synthetic run of 100,000 steps, 200 metrics
    python benchmarks/watch_page.py --steps 1000                       the same of another length
    python benchmarks/watch_page.py --pictures docs/pictures RUN RUN   pictures for docs/watch.md of two runs
    python benchmarks/watch_page.py --check RUN                        all views of a run and of its report.html, light
                                                                       and dark, three widths

Needs playwright (`pip install playwright`) and a Chromium, whose path is in CHROMIUM or which is found by its name.
Seconds are from the start of the server, or from the writing of a step's line, until the page has drawn it; those with
`cpu` in their name are the server's processor time. `--check` waits until every chart is drawn, can be reached by the
keyboard and gives its newest values to a screen reader. It counts these charts, texts whose contrast is below WCAG's
level AA, errors in the console, requests to other machines, and numbers of tokens that differ from the recorded ones.
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
SIZES = {"wide": (1280, 860), "large": (1600, 1000), "phone": (390, 844)}
COPIES_OF_VALUES = 50
"""Lines of metrics that the synthetic run repeats, since generating each one would take minutes."""
PROMPTS = 10_000
VIEWS = {
    "curves": ".chart .u-over",
    "samples": ".rows .sample",
    "prompts": "#prompts .cells",
    "step": "#step .stage",
    "settings": ".config",
}
"""The views of the page, and an element that shows that each is drawn."""
CONTRAST = """() => {
  const parse = text => {
    const parts = (text.match(/[\\d.]+/g) || []).map(Number);
    return text.startsWith("color(srgb") ? parts.map((part, at) => at < 3 ? 255 * part : part) : parts;
  };
  const linear = v => v / 255 <= .04045 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  const ground = element => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
  };
  const isText = node => node.nodeType === 3 && node.textContent.trim();
  const texts = [...document.querySelectorAll("body *")].filter(
    e => e.checkVisibility() && [...e.childNodes].some(isText) && getComputedStyle(e).opacity === "1");
  return texts.map(e => {
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    return [(a + .05) / (b + .05), e.className, e.textContent.slice(0, 40)];
  }).filter(([ratio]) => ratio < 4.5);
}"""
"""Texts whose contrast with their background is below WCAG's level AA."""
CHARTS = """() => [...document.querySelectorAll(".chart")].filter(e => e.checkVisibility()).map(
  e => [e.ariaLabel, e.tabIndex === 0 && e.ariaLabel?.includes(". ")])"""
"""Charts on the page: each one's accessible text, and whether that is more than its title and the keyboard reaches
it."""


def browser_path() -> str | None:
    """A Chromium of this machine."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def page(path: str, size: str = "wide", colors: str = "light") -> Iterator[Any]:
    """An empty page in a separate browser."""
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
    """Wait until an expression holds in the page. The page's rules do not allow scripts from elsewhere."""
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
    """A synthetic run with METRICS metrics, those of the catalogue first."""
    from hybrid_grpo.records.metrics.catalogue import CATALOGUE

    names = [metric.name for metric in CATALOGUE if "<" not in metric.name]
    names += [f"source/s{number // 2}/{'reward' if number % 2 else 'count'}" for number in range(METRICS - len(names))]
    drawn = random.Random(0)
    bodies = [", ".join(f'"{name}": {drawn.random()}' for name in names) for _ in range(COPIES_OF_VALUES)]
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            file.write(f'{{"step": {step}, {bodies[step % COPIES_OF_VALUES]}}}\n')
    return folder


def write_details(folder: Path, steps: int, prompts: int = 32) -> None:
    """details.jsonl of `steps` steps on two ranks, in the form described in docs/dashboards.md."""
    drawn = random.Random(1)
    times = [round(0.02 * at, 3) for at in range(64)]
    busy = [24 if at < 40 else 63 - at for at in range(64)]
    decoder = {"t": times, "decoding": busy, "waiting": [1] * 64, "queued": [max(0, 40 - at) for at in range(64)]}
    stages = [[["generate", 0.0, end], ["reward_wait", end, end + 0.1], ["train", 3.1, 4.2]] for end in (1.2, 3.0)]
    rest = json.dumps({"stages": stages, "decoder": [{**decoder, "slots": 24, "pages_used_max": 0.8}] * 2})[1:]
    edges = [round(at / 20, 3) for at in range(21)]
    with (folder / "details.jsonl").open("w") as file:
        for step in range(1, steps):
            groups = [[drawn.randrange(PROMPTS), round(drawn.random(), 4), 0.3] for _ in range(prompts)]
            counts = [drawn.randrange(50) + 1 for _ in range(20)]
            shapes = {name: {"edges": edges, "counts": counts} for name in ("reward", "length", "entropy")}
            noted = {"step": step, "prompts": groups, **({"histograms": shapes} if step % 10 == 0 else {})}
            file.write(json.dumps(noted)[:-1] + ", " + rest + "\n")


def measure(steps: int, browser: str) -> dict[str, Any]:
    """Seconds until the first chart is drawn and until all metrics are read, memory of the server, seconds until a new
    step is shown, processor time and size of report.html."""
    from hybrid_grpo.watch.frozen import write_report

    with tempfile.TemporaryDirectory() as place:
        run = write_run(Path(place) / "large", steps)
        write_details(run, steps)
        gigabytes, more = ((run / name).stat().st_size / 1e9 for name in ("metrics.jsonl", "details.jsonl"))
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
                views = {}
                for view, whole in (("step", "step"), ("prompts", "prompts")):
                    start, before = time.perf_counter(), cpu(process)
                    tab.locator(f"[data-view={view}]").click()
                    tab.wait_for_selector(VIEWS[view])
                    views[f"{view}_open_s"] = round(time.perf_counter() - start, 2)
                    until(tab, f"!document.querySelector('#{whole} [role=status]').innerText.includes('% read')", 3600)
                    views[f"{view}_all_read_cpu_s"] = round(cpu(process) - before, 1)
                megabytes = process.memory_info().rss / 2**20
        start = time.process_time()
        report_megabytes = write_report(run).stat().st_size / 1e6
        report_cpu = time.process_time() - start
    return {
        "steps": steps, "metrics": METRICS, "gigabytes": round(gigabytes, 3), "open_s": round(opened, 2),
        "open_cpu_s": round(opened_cpu, 2), "all_read_s": round(exact, 1), "all_read_cpu_s": round(exact_cpu, 1),
        "new_step_s": round(live, 2), "details_gigabytes": round(more, 3), **views, "server_mb": round(megabytes),
        "report_cpu_s": round(report_cpu, 1), "report_mb": round(report_megabytes, 1),
    }  # fmt: skip


def cpu(process: psutil.Process) -> float:
    """Processor seconds, which on an idle machine equal wall time."""
    times = process.cpu_times()
    return float(times.user + times.system)


def check(run: Path, browser: str) -> dict[str, Any]:
    """The counts of `--check`, with the tokens of a few completions compared, for the served page and for the run's
    report.html, which is written again."""
    from hybrid_grpo.watch.frozen import write_report

    with served(run) as (url, _):
        return {
            "served": check_page(f"{url}/", run, browser, range(0, 100, 10)),
            "report.html": check_page(write_report(run).as_uri(), run, browser, range(0, 16, 3)),
        }


def check_page(address: str, run: Path, browser: str, numbers: range) -> dict[str, Any]:
    """The counts of `--check` on one page; `numbers` are the indices in its list of the completions whose tokens are
    compared."""
    from hybrid_grpo.records.files import rollout_files

    step = max(step for step, path in rollout_files(run / "rollouts").items() if path.with_suffix(".parquet").exists())
    found: dict[str, Any] = {"charts": 0, "unreadable": [], "too_wide": [], "console": []}
    asked: list[str] = []
    for size in SIZES:
        for colors in ("light", "dark"):
            with page(browser, size, colors) as tab:
                # Charts are drawn when they become visible: this screen shows all of them.
                tab.set_viewport_size({"width": SIZES[size][0], "height": 20_000})
                tab.on("console", lambda message: found["console"].append(message.text))
                tab.on("pageerror", lambda error: found["console"].append(str(error)))
                tab.on("request", lambda request: asked.append(request.url))
                for view, drawn in VIEWS.items():
                    tab.goto(f"{address}#view={view}&run={run.name}")
                    tab.wait_for_selector(drawn, state="attached")
                    until(tab, f"({CHARTS})().every(([words, isReached]) => isReached)")
                    if view == "samples":
                        open_tokens(tab, step)
                        open_group(tab)
                    charts = tab.evaluate(CHARTS)
                    found["charts"] += len(charts)
                    found["unreadable"] += tab.evaluate(CONTRAST)
                    found["too_wide"] += [view] * tab.evaluate("document.documentElement.scrollWidth > innerWidth")
    with page(browser) as tab:
        tab.goto(f"{address}#view=samples&run={run.name}")
        tab.wait_for_selector(VIEWS["samples"])
        found["token_numbers"], found["wrong_token_numbers"] = 0, []
        for number in numbers:
            open_tokens(tab, step, number)
            count, wrong = compare_tokens(tab, run, step)
            found["token_numbers"] += count
            found["wrong_token_numbers"] += wrong
    asked = [request for request in asked if not request.startswith("data:")]
    found["requests"] = len(asked)
    found["requests_elsewhere"] = [request for request in asked if not request.startswith(address)]
    return found


def open_tokens(tab: Any, step: int, number: int = 0) -> None:
    """Open one of a step's completions in the view of the samples, token by token."""
    if not tab.is_visible("[name=last]"):
        tab.locator("#samples .filters").click()
    tab.fill("[name=last]", str(step))
    tab.keyboard.press("Enter")
    until(tab, "/^[\\d,]+ found/.test(document.querySelector('#samples [role=status]').innerText)")
    # The state of another completion must not be taken for this one's.
    tab.evaluate("document.querySelector('.detail').replaceChildren()")
    tab.locator(".rows .sample").nth(number).click()
    until(tab, f"document.querySelectorAll('.rows .sample')[{number}].matches('.chosen')")
    tab.wait_for_selector(".tokens .token")


def open_group(tab: Any) -> None:
    """Show all completions of the prompt of the one that is open."""
    tab.locator(".detail .to-group").click()
    tab.wait_for_selector(".around .member")


def compare_tokens(tab: Any, run: Path, step: int) -> tuple[int, list[str]]:
    """Read every token of the open completion with the keyboard. Returns how many numbers were compared with the
    recorded ones, and those that differ."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(run / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
    shown = [place.inner_text() for place in tab.locator(".detail dd").all()]
    group, sample = (int(part) for part in shown[5].split(", completion "))
    (row,) = (row for row in table if (row["prompt_index"], row["sample"]) == (group, sample))
    tab.locator(".tokens").focus()
    wrong, count = [], 0
    for at, piece in enumerate(row["pieces"]):
        tab.keyboard.press("ArrowRight")
        lines = [line.split("\t") for line in tab.locator(".tip").inner_text().split("\n")]
        said = {parts[0]: parts[-1] for parts in lines}
        expected = {"log-prob": row["logp"][at], "advantage": row["advantage"][at], "id": row["token_ids"][at]}
        for name, value in expected.items():
            count += 1
            if float(said.get(name, "nan")) != float(f"{value:.6g}"):
                wrong.append(f"step {step}, group {group}, sample {sample}, token {at}: {name} {value}: {said}")
        if json.loads(lines[0][0]) != piece:
            wrong.append(f"token {at} is {piece}, not {lines[0][0]}")
    return count, wrong


def picture(folder: Path, runs: list[Path], browser: str) -> None:
    """Pictures of the views, in light and dark, wide and on a phone."""
    from hybrid_grpo.records.files import rollout_files

    folder.mkdir(parents=True, exist_ok=True)
    chosen, lone = "".join(f"&run={run.name}" for run in runs), f"&run={runs[-1].name}"
    with served(*runs) as (url, _):
        for name, size, colors, view, shown in (
            ("watch-light", "wide", "light", "curves", chosen),
            ("watch-dark", "wide", "dark", "curves", chosen),
            ("watch-phone", "phone", "light", "curves", chosen),
            ("watch-phone-dark", "phone", "dark", "curves", chosen),
            ("watch-tokens", "wide", "light", "samples", lone),
            ("watch-prompts", "wide", "light", "prompts", lone),
            ("watch-step", "wide", "dark", "step", lone),
            ("watch-step-phone", "phone", "light", "step", lone),
        ):
            with page(browser, size, colors) as tab:
                tab.goto(f"{url}/#view={view}{shown}")
                tab.wait_for_selector(VIEWS[view], state="attached")
                tab.wait_for_timeout(1500)
                if view == "samples":
                    saved, replayed = rollout_files(runs[-1] / "rollouts"), runs[-1] / "replay"
                    tab.fill("[name=most]", "1.9")
                    open_tokens(
                        tab, max((s for s in saved if (replayed / f"step_{s:06d}.parquet").exists()), default=0)
                    )
                    tab.locator(".tokens").focus()
                    tab.keyboard.press("ArrowRight")
                elif view == "curves" and size == "wide":
                    area = tab.locator(".chart .u-over").nth(3).bounding_box()
                    tab.mouse.move(area["x"] + 0.25 * area["width"], area["y"] + 60)
                elif view == "prompts":
                    area = tab.locator("#prompts .heat").bounding_box()
                    tab.mouse.move(area["x"] + 0.4 * area["width"], area["y"] + 0.3 * area["height"])
                tab.wait_for_timeout(500)
                tab.screenshot(path=folder / f"{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=re.sub(r"\n +", "\n", __doc__ or ""))
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    options = parser.parse_args()
    browser = browser_path()
    if browser is None:
        sys.exit("there is no Chromium: install one, or give its path in CHROMIUM")
    if options.pictures:
        picture(options.pictures, options.runs, browser)
    elif options.check:
        print(json.dumps(check(options.check, browser), indent=2))
    else:
        print(json.dumps(measure(options.steps, browser), indent=2))


if __name__ == "__main__":
    main()
