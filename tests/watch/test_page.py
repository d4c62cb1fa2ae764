"""The page in a browser. Skipped where there is no playwright or no Chromium; see benchmarks/watch_page.py."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow
import pyarrow.parquet
import pytest
import uvicorn
from paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import watch_page

from hybrid_grpo.records.alarm_records import AlarmRecord, write_alarm
from hybrid_grpo.watch import server
from hybrid_grpo.watch.folders import Folders
from hybrid_grpo.watch.frozen import write_report

pytest.importorskip("playwright")
BROWSER = watch_page.browser_path()
pytestmark = [pytest.mark.process, pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")]


def numbers(rise: float) -> list[dict[str, float]]:
    return [
        {
            "step": step, "reward/mean": rise * step / 60, "reward/std": 0.1, "time/step_s": 60.0,
            "policy/entropy": 1.0 - step / 100, "parity/logp_abs_diff_mean": 0.2 if step == 30 else 0.0,
            "completion/sampled_tokens": 1000.0,
            **({"eval/heldout/accuracy": step / 60} if step % 20 == 0 else {}),
        }
        for step in range(61)
    ]  # fmt: skip


@pytest.fixture
def runs(make_run: Any) -> list[Path]:
    text = "<img src=x onerror=alert(1)> the answer is 42"
    row = {"group": 0, "sample": 0, "prompt_id": 0, "prompt": [{"role": "user", "content": "What?"}], "reward": 0.5}
    row |= {"rewards": {"f": 0.5}, "advantage": 0.1, "length": 9, "finish": "stop", "columns": {"answer": "42"}}
    saved = {step: [{**row, "step": step, "completion": text if step == 20 else "no"}] for step in (1, 20, 60)}
    slow = make_run("slow", numbers(1.0), "policy: {lr: 0.1}", saved)
    watch_page.write_details(slow, 61, prompts=8)
    tokens = {"token_ids": [[7, 8]], "pieces": [["the", " answer"]], "logp": [[-0.123456789, -2.5]]}
    tokens |= {"row": [0], "prompt_index": [0], "sample": [0], "advantage": [[0.1, -0.1]]}
    pyarrow.parquet.write_table(pyarrow.table(tokens), slow / "rollouts" / "step_000020.parquet")
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
def heard_page() -> Iterator[tuple[Any, list[str], list[str]]]:
    """A page of the browser, with what it complains of and the addresses that it asks for."""
    assert BROWSER
    with watch_page.page(BROWSER) as tab:
        complaints: list[str] = []
        asked: list[str] = []
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        yield tab, complaints, asked


def test_a_reader_s_way_through_the_page(url: str, runs: list[Path]) -> None:
    with heard_page() as (tab, complaints, asked):
        tab.goto(f"{url}/#run=slow&run=fast")

        # Every chart is drawn and labelled; the setting that differs and the alarms are named.
        watch_page.until(tab, "document.querySelectorAll('.chart canvas').length >= 4")
        assert tab.locator("#overview").inner_text().split("\n")[0].split("\t")[:2] == ["Run", "policy.lr"]
        assert "sampler and training forward differ by 0.2000 nats" in tab.locator("#alarms").inner_text()
        titles = [" ".join(title.split()) for title in tab.locator(".chart:visible h3").all_inner_texts()]
        assert titles[:4] == ["Held-out accuracy", "Reward", "Entropy nats", "Mean gap nats"]
        reward = tab.locator(".chart", has_text="Reward").first

        # With the keyboard: the values of both runs at the last step, then zoom, and back.
        reward.focus()
        tab.keyboard.press("ArrowLeft")
        tab.wait_for_selector(".tip:visible")
        tip = tab.locator(".tip").inner_text()
        assert "slow" in tip and "fast" in tip and "step 59" in tip
        tab.keyboard.press("+")
        tab.wait_for_selector("#reset:visible")
        tab.keyboard.press("0")
        tab.wait_for_selector("#reset", state="hidden")

        # With the mouse.
        area = reward.locator(".u-over").bounding_box()
        tab.mouse.move(area["x"] + 0.5 * area["width"], area["y"] + 50)
        watch_page.until(tab, "document.querySelector('.tip').innerText.includes('step 30')")
        tab.mouse.down()
        tab.mouse.move(area["x"] + 0.75 * area["width"], area["y"] + 50, steps=4)
        tab.mouse.up()
        watch_page.until(tab, "location.hash.includes('range=')")
        low, high = (float(end) for end in tab.url.split("range=")[1].split("&")[0].split("%7E"))
        assert (low, high) == pytest.approx((30, 45), abs=1)
        tab.locator("#reset").click()

        # A new step appears by itself.
        with (runs[0] / "metrics.jsonl").open("a") as file:
            solved = {"group/all_right_frac": 0.25, "group/all_wrong_frac": 0.25}
            file.write(json.dumps({"step": 61, "reward/mean": 77.0, "policy/entropy": 0.1, **solved}) + "\n")
        watch_page.until(tab, "document.body.innerText.includes('step 61')")
        watch_page.until(tab, "[...document.querySelectorAll('.chart')].some(e => e.ariaLabel.includes('slow 77'))")

        # Completions are found by what they say, and are text, whatever they say.
        tab.locator("[data-view=samples]").click()
        tab.fill("[name=text]", "ANSWER is")
        tab.keyboard.press("Enter")
        watch_page.until(tab, "document.querySelector('#samples [role=status]').innerText.startsWith('1 found in 3')")
        tab.locator(".rows .sample").focus()
        tab.keyboard.press("Enter")
        tab.wait_for_selector(".detail:visible")
        assert "<img src=x onerror=alert(1)> the answer is 42" in tab.locator(".detail").inner_text()
        tab.locator("[data-tokens=true]").click()
        count, wrong = watch_page.compare_tokens(tab, runs[0], 20)
        assert (count, wrong) == (6, [])

        # A step from the inside; the map of prompts, a cell of which leads to the completions of its prompt.
        tab.locator("[data-view=step]").click()
        tab.wait_for_selector("#step .stage")
        assert "Rank 1 is 1.8 s slower than the median in generate." in tab.locator("#step").inner_text()
        charts = tab.evaluate(watch_page.CHARTS)
        assert len(charts) == 9 and all(is_reached for _, is_reached in charts), charts
        for chart, words in (("Where the time went", "reward wait, rank 0"), ("Decoder", "20 ms"), ("Rewards", "0.05")):
            tab.locator("#step .chart", has_text=chart).first.focus()
            tab.keyboard.press("ArrowRight")
            tab.keyboard.press("ArrowRight")
            assert words in tab.locator(".tip").inner_text()
        tab.locator(".steps").focus()
        tab.keyboard.press("Home")
        watch_page.until(tab, "document.querySelector('#step [role=status]').innerText.startsWith('Step 1 of 1 to 60')")
        tab.locator("[data-view=prompts]").click()
        watch_page.until(tab, "document.querySelector('#prompts .chart').ariaLabel.includes('partly 50 %')")
        assert tab.locator("#prompts .chart:visible").count() == 1, "a map of prompts that were drawn once says nothing"
        tab.locator("#prompts select").nth(1).select_option("mean")
        tab.wait_for_selector("#prompts .cells")
        tab.locator("#prompts .chart").nth(1).focus()
        tab.keyboard.press("ArrowDown")
        assert "mean reward" in tab.locator(".tip").inner_text()
        tab.keyboard.press("Enter")
        watch_page.until(tab, "document.querySelector('#prompts [role=status]').innerText.includes('40 of')")
        tab.keyboard.press("ArrowDown")
        tab.keyboard.press("Enter")
        watch_page.until(
            tab, "document.querySelector('#samples [role=status]').innerText.startsWith('0 found in 1 comp')"
        )
        assert tab.locator("[name=prompt]").input_value().isdecimal()
        tab.locator("[data-view=settings]").click()
        watch_page.until(tab, "document.querySelector('#settings').innerText.includes('policy.lr')")

        assert complaints == []
        assert [address for address in asked if not address.startswith((url, "data:"))] == []


def test_runs_say_how_they_are_and_charts_close_and_quick_clicks_do_no_harm(url: str, runs: list[Path]) -> None:
    """A TypeError was thrown where the answer about two runs came after one of them had been left out."""
    (runs[0] / ".lock").write_text("")
    (runs[1] / ".lock").write_text("{}")
    os.utime(runs[1] / ".lock", (0, 0))
    for run in runs:
        (run / "config.yaml").write_text("run: {steps: 100}\n")
    with heard_page() as (tab, complaints, _):
        tab.goto(f"{url}/#run=slow")
        watch_page.until(tab, "document.querySelector('#runs').innerText.includes('step 60 of 100, stopped')")
        watch_page.until(tab, "document.querySelector('#runs').innerText.includes('step 60 of 100, killed')")
        watch_page.until(tab, "document.querySelectorAll('.chart canvas').length >= 4")
        # The answer about one run comes when another has been chosen, and before it is asked about.
        slow = "['curves', 50], ['runs', 400]].find(([name]) => String(given[0]).includes(name))"
        tab.evaluate(
            "() => { const fetched = window.fetch; window.fetch = async (...given) => {"
            f" const found = [{slow}; await new Promise(done => setTimeout(done, found ? found[1] : 0));"
            " return fetched(...given); }; }"
        )
        for _ in range(3):
            tab.evaluate(
                "() => { document.querySelector('#window').dispatchEvent(new Event('change'));"
                " [...document.querySelectorAll('#runs .run')].find(run => run.title.endsWith('fast')).click(); }"
            )
            tab.wait_for_timeout(900)
        watch_page.until(tab, "document.querySelectorAll('.chart canvas').length >= 4")
        reward = tab.locator(".chart", has_text="Reward").first
        reward.locator("button[aria-pressed]").click()
        assert "wide" in (reward.get_attribute("class") or "")
        tab.keyboard.press("Escape")
        assert "wide" not in (reward.get_attribute("class") or "")
        assert complaints == []


def test_runs_are_chosen_compared_and_taken_away(url: str, runs: list[Path], make_run: Any) -> None:
    """What readers do who come back: find, sort, compare the answers to one prompt, keep a view, a chart, a page."""
    fast = runs[1]
    said = ["I say 4 apples", "I say 5 apples", "I say 4 apples"]
    rows = [
        {"step": 3, "group": 0, "sample": at, "prompt_id": 7, "prompt": "How many?", "completion": text}
        | {"reward": float("4" in text), "advantage": 0.1, "length": 4, "finish": "stop"}
        for at, text in enumerate(said)
    ]
    for run in runs:
        (run / "rollouts" / "step_000003.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (fast / "config.yaml").write_text("policy: {lr: 0.2}\nlog: {tags: [sweep], notes: twice the rate}\n")
    (fast / "console.log").write_text("step 60\nOSError: no space\n")
    (fast / ".lock").write_text("")
    make_run("other", [{"step": step, "reward/mean": 9.0, "policy/loss": 0.0} for step in range(9)])
    with heard_page() as (tab, complaints, _):
        tab.goto(f"{url}/#run=slow")

        # The list: sorted, found by tag, all that are found chosen at once; a failure says its last line.
        def listed() -> list[str]:
            return [name for name in tab.locator("#runs li:visible .name").all_inner_texts()]

        watch_page.until(tab, "document.querySelectorAll('#runs li').length === 3")
        assert "OSError: no space" in tab.locator("#runs").inner_text()
        tab.select_option("#sort-runs", "reward")
        assert listed() == ["other", "fast", "slow"]
        tab.select_option("#sort-runs", "run")
        assert listed() == ["fast", "other", "slow"]
        tab.fill("#find-run", "TWICE sweep")
        assert listed() == ["fast"]
        tab.locator("#all-runs").click()
        watch_page.until(tab, "document.querySelector('#overview').innerText.includes('fast')")
        assert tab.url.count("run=") == 1
        tab.fill("#find-run", "")

        # Hover on a curve of few values says where they are; zooming leaves the chart where it is.
        tab.goto(f"{url}/#run=slow&run=other")
        watch_page.until(tab, "document.querySelectorAll('.chart canvas').length >= 4")
        assert "Nothing but 0 so far: Loss" in tab.locator(".folded:visible").first.inner_text()
        chart = tab.locator(".chart", has_text="Held-out accuracy").first
        area = chart.locator(".u-over").bounding_box()
        tab.mouse.move(area["x"] + 0.55 * area["width"], area["y"] + 50)
        watch_page.until(tab, "/^step 40\\s/.test(document.querySelector('.tip').innerText)")
        before = chart.bounding_box()
        tab.mouse.down()
        tab.mouse.move(area["x"] + 0.75 * area["width"], area["y"] + 50, steps=4)
        tab.mouse.up()
        watch_page.until(tab, "location.hash.includes('range=')")
        tab.wait_for_timeout(300)
        assert chart.bounding_box() == before

        # A view is in its address: logarithmic, enlarged, zoomed.
        reward = tab.locator(".chart", has_text="Reward").first
        reward.locator("button[aria-label^=Scale]").click()
        reward.locator("input[type=checkbox]").check()
        reward.locator("button[aria-pressed]").click()
        tab.reload()
        watch_page.until(tab, "document.querySelector('.chart.wide canvas')")
        assert reward.locator("input[type=checkbox]").is_checked() and tab.locator("#reset").is_visible()

        # A chart as a file.
        reward.locator("button[aria-label^=Scale]").click()
        with tab.expect_download() as given:
            reward.get_by_text("Save CSV").click()
        table = [line.split(",") for line in given.value.path().read_text().splitlines()]
        assert table[0][:2] == ['"step"', '"slow reward/mean"'] and given.value.suggested_filename == "reward.csv"
        assert {row[0]: row[1] for row in table[1:]}["40"] == "0.6666667"
        with tab.expect_download() as given:
            reward.get_by_text("Save SVG").click()
        picture = given.value.path().read_text()
        assert ElementTree.fromstring(picture).tag.endswith("svg") and "NaN" not in picture and ">Reward<" in picture

        # A whole page on paper.
        tab.locator("#reset").click()
        tab.evaluate(
            "window.print = () => { window.printed = document.querySelectorAll('.chart:has(canvas)').length; }"
        )
        tab.keyboard.press("Control+p")
        watch_page.until(
            tab,
            "window.printed === document.querySelectorAll('.chart').length - "
            "document.querySelectorAll('.step .chart, #step .chart, #prompts .chart').length",
        )

        # The answers of two runs to one prompt, what they share and where they part; from the list on by keys.
        tab.goto(f"{url}/#view=samples&find.prompt=7&run=slow&run=fast")
        tab.reload()
        tab.wait_for_selector(".rows .sample")
        assert tab.locator("[name=prompt]").input_value() == "7"
        tab.locator(".rows th[data-name=reward] button").click()
        watch_page.until(
            tab, "document.querySelector('#samples [role=status]').innerText.startsWith('3 with the highest')"
        )
        tab.locator(".rows .sample").first.focus()
        tab.keyboard.press("Enter")
        tab.wait_for_selector(".detail:visible")
        tab.locator(".to-group").click()
        watch_page.until(tab, "document.querySelectorAll('.around .member').length === 4")
        assert tab.locator(".around .shared").first.inner_text() == "I say "
        assert tab.locator(".around mark").first.inner_text() == "5"
        assert "4 tokens, stop: 2 times" in tab.locator(".around").inner_text()
        tab.locator(".detail").focus()
        tab.keyboard.press("j")
        tab.keyboard.press("j")
        watch_page.until(tab, "document.querySelector('.detail dd').innerText === '0'")
        offset = tab.url.split("sample=3%7E")[1].split("&")[0]
        tab.reload()
        watch_page.until(tab, "document.querySelector('.detail dd')?.innerText === '0'")
        assert tab.url.split("sample=3%7E")[1].split("&")[0] == offset

        # Settings: what differs, what is not the default, and all behind a search.
        tab.locator("[data-view=settings]").click()
        tab.wait_for_selector(".settings tbody tr")
        assert tab.locator(".settings tbody th").first.inner_text() == "policy.lr"
        assert tab.locator(".settings tbody b").all_inner_texts()[:2] == ["0.1", "0.2"]
        assert "OSError: no space" in tab.locator("#settings").text_content()
        tab.locator("#settings select").select_option("all")
        tab.locator("#settings input").fill("twice")
        assert tab.locator(".settings tbody th").all_inner_texts() == ["log.notes"]
        assert complaints == []


def test_eight_runs_with_thirty_alarms(url: str, make_run: Any) -> None:
    """The first chart was 1,010 pixels down the page, below a table and a line for every alarm."""
    for number in range(8):
        run = make_run(f"run{number}", numbers(1 + number / 8), f"log: {{group: g{number // 4}}}")
        for at in range(5 if number > 1 else 0):
            kind = ("parity", "kl", "ratio")[at % 3]
            write_alarm(run, AlarmRecord(10 * at, kind, 10 * at, f"{kind}: high"))
            write_alarm(run, AlarmRecord(10 * at + 6, kind, 10 * at, "", until=10 * at + 5))
    with heard_page() as (tab, complaints, _):
        tab.set_viewport_size({"width": 1440, "height": 900})
        tab.goto(f"{url}/#" + "&".join(f"run=run{number}" for number in range(8)))
        watch_page.until(tab, "document.querySelectorAll('.chart canvas').length >= 4")
        box = tab.locator(".chart:visible").first.bounding_box()
        assert box["y"] + box["height"] <= 450, "it is in the upper half"
        assert "Alarms (30)" in tab.locator("#alarms").inner_text()
        tab.locator("#alarms summary").click()
        watch_page.until(tab, "document.querySelectorAll('#alarms li:has(.line)').length === 3")
        assert tab.locator("#alarms li").first.locator(".line").count() == 6, "runs without alarms have no lane"
        assert "12 times in 6 runs" in tab.locator("#alarms li").first.inner_text()
        assert "step 30 to 35: high" in tab.locator("#alarms li").first.inner_text()

        # Groups as one: two curves with a spread; a baseline, with the others' distance from it.
        tab.locator("#grouped").check()
        watch_page.until(tab, "document.querySelector('#overview').innerText.includes('g0 4 runs')")
        assert tab.locator("#overview tbody tr").count() == 2
        watch_page.until(
            tab, "document.querySelector('.chart:not([hidden])').innerText.includes('lowest to the highest')"
        )
        tab.locator("#runs li", has_text="run7").hover()
        tab.locator("#runs li", has_text="run7").locator("button", has_text="pin").click()
        watch_page.until(tab, "document.querySelector('#overview').innerText.includes('baseline')")
        mean = [sum(1 + number / 8 for number in four) / 4 for four in (range(4), range(4, 8))]
        assert f"{mean[1] - mean[0]:.3f}" in tab.locator("#overview tbody tr").nth(1).inner_text()

        # Archived runs are out of the list, also after a reload, until they are restored.
        tab.locator("#runs li", has_text="run3").hover()
        tab.locator("#runs li", has_text="run3").locator("button", has_text="archive").click()
        watch_page.until(tab, "!document.querySelector('#overview').innerText.includes('g0 4 runs')")
        tab.reload()
        watch_page.until(tab, "document.querySelector('#archived').innerText === 'Show 1 archived'")
        assert tab.locator("#runs li:visible").count() == 9 and "run=run3" not in tab.url
        tab.locator("#archived").click()
        assert tab.locator("#runs li:visible").count() == 10

        tab.fill("#find-chart", "no such thing")
        assert tab.locator("#no-chart").inner_text() == "No chart matches “no such thing”."
        tab.fill("#find-chart", "")
        assert tab.locator("#no-chart").is_hidden() and complaints == []


def test_an_empty_folder_names_a_command(url: str, runs: list[Path]) -> None:
    for run in runs:
        (run / "metrics.jsonl").unlink()
    with heard_page() as (tab, *_):
        tab.goto(url)
        watch_page.until(tab, "document.querySelector('#overview').innerText.includes('There is no run here yet')")
        assert tab.locator("#overview code").inner_text().endswith(f"--run.dir {runs[0].parent}")


def test_a_frozen_page_opens_from_its_file(runs: list[Path]) -> None:
    with heard_page() as (tab, complaints, asked):
        report = write_report(runs[0])
        tab.goto(report.as_uri())
        for view, drawn in watch_page.VIEWS.items():
            tab.locator(f"[data-view={view}]").click()
            tab.wait_for_selector(drawn)
            if view == "curves":
                assert "band: ± std" in tab.locator(".chart", has_text="Reward").first.inner_text()
                tab.locator("#axis").select_option("hours")
                watch_page.until(tab, "document.querySelector('.u-over') && location.hash.includes('hours')")
        tab.locator("[data-view=step]").click()
        assert "Where the time of the steps went" in tab.locator("#step").inner_text()
        tab.locator("[data-view=samples]").click()
        watch_page.open_tokens(tab, 20)
        assert watch_page.compare_tokens(tab, runs[0], 20) == (6, [])
        assert {address for address in asked if not address.startswith("data:")} == {report.as_uri()}
        # Trackers show it in a frame, which has neither storage nor an address of its own.
        around = report.with_name("around.html")
        around.write_text('<!DOCTYPE html><iframe src="report.html" sandbox="allow-scripts" width="1200"></iframe>')
        tab.goto(around.as_uri())
        frame = tab.frame_locator("iframe")
        frame.locator("#overview", has_text="slow").wait_for()
        frame.locator("#theme").click()
        frame.locator("[data-view=samples]").click()
        frame.locator(".rows .sample").first.wait_for()
        assert complaints == []


def test_words_that_differ_are_marked_where_texts_are_alike_and_pieces_make_up_the_text(url: str) -> None:
    assert BROWSER
    pairs = [
        ("the answer is 42 apples, I am quite sure of it", "the answer is 41 apples, I am quite so"),
        ("aelmp", "aempl"), ("abc", "xyz"), ("", "x"),
    ]  # fmt: skip
    with watch_page.page(BROWSER) as tab:
        tab.goto(url)
        module = "import('/page/differing.js')"
        answers = tab.evaluate(f"pairs => {module}.then(found => pairs.map(pair => found.differing(...pair)))", pairs)
    for sides, texts in zip(answers, pairs, strict=True):
        assert tuple("".join(text for text, _ in pieces) for pieces in sides) == texts
    left, right = answers[0]
    assert ["42", True] in left and ["41", True] in right
    assert answers[1][0] != [["aelmp", False]], "short texts are compared by characters"
    assert answers[2] == [[["abc", False]], [["xyz", False]]]


@pytest.mark.parametrize("colors", ["light", "dark"])
@pytest.mark.parametrize("size", ["large", "phone"])
def test_texts_can_be_read_and_nothing_is_wider_than_the_screen(url: str, size: str, colors: str) -> None:
    assert BROWSER
    with watch_page.page(BROWSER, size, colors) as tab:
        tab.goto(f"{url}/#run=slow&run=fast")
        tab.wait_for_selector(".chart canvas")
        for view, drawn in watch_page.VIEWS.items():
            tab.locator(f"[data-view={view}]").click()
            tab.wait_for_selector(drawn)
            if view == "samples":
                watch_page.open_tokens(tab, 20)
                watch_page.open_group(tab)
            assert tab.evaluate(watch_page.CONTRAST) == [], view
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
