"""The page of `hybrid-grpo watch` in a browser, as tests/watch/test_page.py opens, reads and checks it.

Needs playwright (`pip install playwright`) and a Chromium, whose path is in CHROMIUM or which is found by its name.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SIZES = {"wide": (1280, 860), "large": (1600, 1000), "phone": (390, 844)}
VIEWS = {
    "curves": ".chart .u-over",
    "samples": ".rows .sample",
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


def write_details(folder: Path, steps: int) -> None:
    """details.jsonl of `steps` steps on two ranks, in the form described in docs/watch.md."""
    times = [round(0.02 * at, 3) for at in range(64)]
    busy = [24 if at < 40 else 63 - at for at in range(64)]
    decoder = {"t": times, "decoding": busy, "waiting": [1] * 64, "queued": [max(0, 40 - at) for at in range(64)]}
    stages = [[["generate", 0.0, end], ["reward_wait", end, end + 0.1], ["train", 3.1, 4.2]] for end in (1.2, 3.0)]
    rest = {"stages": stages, "decoder": [{**decoder, "slots": 24, "pages_used_max": 0.8}] * 2}
    with (folder / "details.jsonl").open("w") as file:
        for step in range(1, steps):
            file.write(json.dumps({"step": step, **rest}) + "\n")


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
