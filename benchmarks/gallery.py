"""docs/gallery.md: how a healthy run looks, and how each alarm looks, in pictures of runs that were really trained.

    python benchmarks/alarms.py --folder FOLDER        trains the runs, one for each alarm and healthy ones (15 minutes)
    python benchmarks/gallery.py FOLDER QUICKSTART     draws the pictures and writes the page; needs playwright, and the
                                                       folder of a run of the quickstart

A picture shows the charts that tell most of a run, with the alarm as a dashed line where the page of `watch` draws it.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import watch_page
import yaml

ROOT = Path(__file__).parent.parent
PAGE, PICTURES = ROOT / "docs" / "gallery.md", ROOT / "docs" / "pictures" / "gallery"
WIDTH = 1050
HEAD = """\
How runs look, as [watch](watch.md) draws them: first a healthy one, then one for each alarm. Every run was really
trained, on the quickstart's task with a tiny model. The healthy one is the quickstart's; the sick ones go wrong in one
way at step 12. The dashed line is where the alarm's first bad step was. What to do about each alarm is in
[when something looks wrong](when-something-looks-wrong.md).

`python benchmarks/alarms.py --folder FOLDER` trains the sick runs, and `python benchmarks/gallery.py FOLDER
runs/quickstart` writes this page."""
HEALTHY = "healthy"
"""The entry of gallery.yaml that is no alarm."""
GATHER = """titles => {
  const shown = titles.map(title => [...document.querySelectorAll('#charts .chart')].find(
    chart => chart.querySelector('h3').firstChild.textContent === title));
  const box = document.createElement('div');
  box.id = 'gallery'; box.className = 'charts';
  box.style.padding = '8px';
  document.querySelector('main').prepend(box);
  for (const silent of document.querySelectorAll('.silent')) silent.open = true;
  box.append(...shown.filter(Boolean));
  document.body.style.display = 'block';
  const others = document.querySelectorAll('aside, main > :not(#gallery), .chart header button');
  for (const other of others) other.style.display = 'none';
  return shown.map(Boolean);
}"""


def message(folder: Path, alarm: str) -> str:
    """What the run said when its alarm went off."""
    lines = [json.loads(line) for line in (folder / "alarms.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["alarm"] == alarm)
    return f"step {first['step']}: {first['message']}"


def picture(tab: Any, address: str, titles: list[str], path: Path) -> None:
    """Draw the charts with these titles side by side."""
    tab.goto("about:blank")
    tab.goto(address)
    tab.wait_for_selector("#charts .chart", state="attached")
    missing = [title for title, is_there in zip(titles, tab.evaluate(GATHER, titles), strict=True) if not is_there]
    assert not missing, f"{address} has no chart {missing}"
    watch_page.until(
        tab, "[...document.querySelectorAll('#gallery .chart')].every(chart => chart.querySelector('canvas'))"
    )
    tab.wait_for_timeout(400)
    tab.locator("#gallery").screenshot(path=path)


def page_of(folder: Path, entries: dict[str, Any]) -> str:
    """The text of the page."""
    parts = ["# Gallery", HEAD]
    for name, entry in entries.items():
        parts += ["## A healthy run" if name == HEALTHY else f"## `{name}`", textwrap.fill(entry["words"], 120)]
        parts.append(f"![{', '.join(entry['charts'])}](pictures/gallery/{name}.png)")
        if name != HEALTHY:
            said = message(folder / name, name)
            parts.append(textwrap.fill(said, 118, initial_indent="> ", subsequent_indent="> ", break_long_words=False))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `alarms.py --folder` has left")
    parser.add_argument("healthy", type=Path, help="a run of the quickstart")
    options = parser.parse_args()
    folder = options.folder
    browser = watch_page.browser_path()
    if browser is None:
        sys.exit("there is no Chromium: install one, or give its path in CHROMIUM")
    PICTURES.mkdir(parents=True, exist_ok=True)
    entries = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    runs = {name: options.healthy if name == HEALTHY else folder / name for name in entries}
    with watch_page.served(*runs.values()) as (url, _), watch_page.page(browser) as tab:
        tab.set_viewport_size({"width": WIDTH, "height": 900})
        for name, run in runs.items():
            picture(tab, f"{url}/#run={run.name}", entries[name]["charts"], PICTURES / f"{name}.png")
            print(name, flush=True)
    PAGE.write_text(page_of(folder, entries), encoding="utf-8")


if __name__ == "__main__":
    main()
