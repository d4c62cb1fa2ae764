import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from paths import ROOT
from starlette.datastructures import QueryParams

from hybrid_grpo.records.alarm_records import AlarmRecord, write_alarm
from hybrid_grpo.watch import server
from hybrid_grpo.watch.answers import Answers
from hybrid_grpo.watch.folders import Folders


class Page:
    """Asks an application what the page asks."""

    def __init__(self, *folders):
        self._app = server.application(Folders(folders))

    def get(self, path, host="127.0.0.1", method="GET", **parameters):
        async def ask():
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
                return await client.request(method, path, params=parameters)

        return asyncio.run(ask())

    def ask(self, question, **parameters):
        answer = self.get(f"/api/{question}", **parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()


def lines(steps, rise=1.0):
    for step in range(steps):
        yield {"step": step, "reward/mean": rise * step, "policy/entropy": 1.0, "own/number": 3, "time/step_s": 3600.0}


@pytest.fixture
def folder(make_run):
    row = {"step": 2, "group": 0, "sample": 0, "prompt": "p=", "completion": "<b>four</b>", "reward": 1.0, "length": 3}
    return make_run("one", list(lines(100)), "policy: {lr: 0.1}", {2: [row, {**row, "completion": "five"}]})


def test_what_a_run_appends_is_answered_to_the_next_question(folder):
    page = Page(folder)
    (before,) = page.ask("runs", run="one")["open"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 100, "reward/mean": 7.0}) + "\n")
    answer = page.ask("runs", run="one")
    (after,), (outline,) = answer["open"], answer["runs"]
    assert after["version"] > before["version"]
    assert (after["read"], after["damaged"], outline["step"]) == (1.0, 0, 100)
    curve = page.ask("curves", run="one", name="reward/mean", window="1")["one"]["curves"]["reward/mean"]
    assert [axis[-1] for axis in curve["raw"]] == [100, 7.0]
    assert page.ask("runs", run="one")["open"][0]["version"] == after["version"], "nothing new"


def test_charts_are_those_of_the_report_and_then_all_other_metrics(folder):
    page = Page(folder)
    page.ask("runs", run="one")
    charts = {chart["title"]: chart for chart in page.ask("charts", run="one")}
    assert list(charts) == ["Reward", "Entropy", "own, number", "time, step s"]
    assert [chart["section"] for chart in charts.values()] == ["Results", "Results", "More", "More"]
    assert charts["time, step s"]["unit"] == "s"
    assert (charts["Reward"]["band"], charts["Reward"]["compared"]) == (None, False), "there is no reward/std"
    (curve,) = charts["Entropy"]["curves"]
    assert curve["name"] == "policy/entropy"
    assert curve["meaning"].startswith("Entropy")


def test_a_number_is_drawn_once(make_run):
    """With one reward function, five charts of the first screen showed the reward or the accuracy."""
    told = {"reward/mean": 0.5, "reward/f/mean": 0.5, "eval/x/accuracy": 0.25, "eval/x/reward_mean": 0.25}
    two = {**told, "reward/g/mean": 0.75, "eval/x/reward_mean": 0.125}
    page = Page(make_run("one", [{"step": 1, **told}]), make_run("two", [{"step": 1, **two}]))
    page.ask("runs", run=["one", "two"])
    for run, folded in (("one", 3), (["one", "two"], 0)):
        charts = [chart for chart in page.ask("charts", run=run) if chart["section"] in ("Results", "Rewards")]
        assert len(charts) == 5 and sum(chart["folded"] == "The same numbers as above" for chart in charts) == folded


def test_curves_of_two_runs_on_an_axis_in_a_range(folder, make_run):
    page = Page(folder, make_run("two", list(lines(5000, rise=2.0))))
    names = ["one", "two"]
    while any(run["read"] < 1 for run in page.ask("runs", run=names)["open"]):
        pass
    answer = page.ask("curves", run=names, name=["reward/mean", "policy/entropy"], axis="hours", low=10, high=20)
    for run, rise in (("one", 1), ("two", 2)):
        x, y = answer[run]["curves"]["reward/mean"]["raw"]
        assert x == [float(hour) for hour in range(9, 22)], "a point more on either side"
        assert y == [rise * (hour - 1.0) for hour in x], "step 0 is the first hour"
    assert (answer["two"]["from"], answer["two"]["to"]) == (1.0, 5000.0)
    thinned = page.ask("curves", run="two", name="reward/mean", points=100)["two"]["curves"]["reward/mean"]
    assert 50 <= len(thinned["raw"][0]) <= 110
    assert "smooth" in thinned
    assert "smooth" not in page.ask("curves", run="two", name="reward/mean", window=1)["two"]["curves"]["reward/mean"]


def test_settings_alarms_and_samples(folder, make_run):
    two = make_run("two", [{"step": 1}, {"step": 2}], "policy: {lr: 0.2}")
    # The numbers of step 3 are not written yet.
    write_alarm(two, AlarmRecord(3, "parity", 1, "the gap is wide"))
    page = Page(folder, two)
    page.ask("runs", run=["one", "two"])
    settings = page.ask("settings", run=["one", "two"])
    (differing,) = (entry for entry in settings["settings"] if entry["differ"])
    assert (differing["name"], differing["values"]) == ("policy.lr", {"one": "0.1", "two": "0.2"})
    assert settings["texts"]["two"] == "policy: {lr: 0.2}"
    (alarm,) = page.ask("alarms", run=["one", "two"])
    assert (alarm["run"], alarm["alarm"], alarm["at"]["step"], alarm["on"]) == ("two", "parity", [1.0, 2.0], True)
    found = page.ask("samples", run="one", text="FOUR", least="0.5")
    (row,) = found["rows"]
    assert (found["read"], found["next"], found["steps"]) == (2, None, [2, 2])
    assert page.ask("sample", run="one", step=2, offset=row["offset"])["completion"] == "<b>four</b>"
    assert page.ask("samples", run="two")["steps"] is None
    assert page.ask("tokens", run="one", step=2, offset=row["offset"]) is None
    lists = {"pieces": [["four"], ["fi", "ve"]], "logp": [[-0.25], [-0.5, -1.0]]}
    table = pyarrow.table({"row": [0, 1], "sample": [0, 0], **lists})
    pyarrow.parquet.write_table(table, folder / "rollouts" / "step_000002.parquet")
    (five,) = page.ask("samples", run="one", text="five")["rows"]
    tokens = page.ask("tokens", run="one", step=2, offset=five["offset"])
    assert tokens == {"pieces": ["fi", "ve"], "ids": [], "given": [], "measures": {"logp": [-0.5, -1.0]}}


def test_a_completion_is_compared_with_the_best_or_the_worst_of_its_group(make_run):
    rewards = {0: (0.5, 1.0, 0.0, None), 1: (0.5, 0.5)}
    rows = [{"group": group, "reward": reward} for group, values in rewards.items() for reward in values]
    page = Page(make_run("one", [{"step": 1}], rollouts={1: rows}))
    places = sorted(row["offset"] for row in page.ask("samples", run="one")["rows"])
    found = [page.ask("rival", run="one", step=1, offset=place) for place in places]
    told = [(rival["kind"], rival["row"]["reward"]) if rival else None for rival in found]
    assert told == [("best", 1.0), ("worst", 0.0), ("best", 1.0), None, None, None]


def test_where_the_time_of_all_steps_went(make_run):
    """In columns of neighbouring steps, with what no timer covers."""
    parts = {"time/generate_s": 2.0, "time/train_s": 1.0, "time/switch_s": 0.0}
    timed = [{"step": step, "time/step_s": 4.0, **parts} for step in range(1, 481)]
    page = Page(make_run("one", [{"step": 0}, *timed]), make_run("two", [{"step": 0}]))
    page.ask("runs", run=["one", "two"])
    answer = page.ask("times", run="one")
    assert (len(answer["steps"]), answer["steps"][0], answer["steps"][-1]) == (240, [1, 2], [479, 480])
    assert {layer["name"]: (set(layer["values"]), layer["total"]) for layer in answer["layers"]} == {
        "generate": ({2.0}, 960.0), "train": ({1.0}, 480.0), "other": ({1.0}, 480.0)
    }  # fmt: skip
    assert page.ask("times", run="two") is None


def test_a_step_s_trace(folder):
    page = Page(folder)
    assert page.ask("step", run="one") == {"details": None, "steps": None}
    with (folder / "details.jsonl").open("w") as file:
        for step in range(1, 11):
            print(json.dumps({"step": step, "stages": [[["generate", 0.0, step]]]}), file=file)
    assert page.ask("step", run="one")["details"]["step"] == 10
    earlier = page.ask("step", run="one", step=4)
    assert earlier == {"details": {"step": 4, "stages": [[["generate", 0.0, 4]]]}, "steps": [1, 10]}
    assert page.ask("runs", run="one")["open"][0]["details"] > 0


@pytest.mark.parametrize("path, parameters, status", [
    ("/api/curves", {"run": "../one"}, 404), ("/api/settings", {"run": "/etc"}, 404), ("/api/samples", {}, 400),
    ("/api/samples", {"run": "one", "least": "x"}, 400), ("/api/samples", {"run": "one", "first": "1e999"}, 400),
    ("/api/sample", {"run": "one", "step": "2", "offset": "7"}, 404),
    ("/api/sample", {"run": "one", "step": "2", "offset": "-5"}, 404),
    ("/api/sample", {"run": "one", "step": "../../x", "offset": "0"}, 400),
    ("/api/tokens", {"run": "one", "step": "2", "offset": "7"}, 404),
    ("/api/rival", {"run": "one", "step": "2", "offset": "7"}, 404), ("/api/times", {}, 400),
    ("/api/tokens", {"run": "one"}, 404), ("/api/curves", {"run": "one", "axis": "years"}, 400),
    ("/api/samples", {"run": "one", "order": "colour"}, 400), ("/api/step", {}, 400), ("/page/../server.py", {}, 404),
    ("/page/%2e%2e/server.py", {}, 404), ("/page//etc/passwd", {}, 404), ("/metrics.jsonl", {}, 404),
    ("/runs/one/config.yaml", {}, 404),
])  # fmt: skip
def test_nothing_but_the_page_and_the_runs_is_served(folder, path, parameters, status):
    answer = Page(folder).get(path, **parameters)
    assert answer.status_code == status, answer.text
    assert "policy" not in answer.text


def test_other_machines_and_other_pages_are_refused(folder):
    """It listens at this machine's own address; a web page that names that address its own is refused by its name; and
    the page itself may ask no other machine for anything."""
    with server.listen(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        places = [place for found in psutil.net_if_addrs().values() for place in found]
        for address in (place.address for place in places if place.family == socket.AF_INET):
            if not address.startswith("127."):
                with pytest.raises(OSError):
                    socket.create_connection((address, listener.getsockname()[1]), timeout=5)
    page = Page(folder)
    assert page.get("/api/runs", host="evil.example").status_code == 400
    assert page.get("/", host="localhost").status_code == 200
    assert page.get("/api/runs", method="POST").status_code == 405
    for path in ("/", "/api/runs", "/page/main.js", "/nothing"):
        assert "default-src 'self'" in page.get(path).headers["content-security-policy"]


def test_the_files_of_the_page_name_only_each_other_and_no_other_machine(folder):
    page, folder = Page(folder), ROOT / "hybrid_grpo/watch/page"
    files = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', files["index.html"]))
    named |= {name for text in files.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert named | {"index.html", "uplot/LICENSE"} == files.keys()
    assert all(page.get(f"/page/{name}").status_code == 200 for name in named)
    own = {name: text for name, text in files.items() if not name.startswith("uplot/")}
    assert [
        name for name, text in own.items() if re.search(r"https?:(?!//www.w3.org/2000/svg\")|innerHTML", text)
    ] == []


def test_ids_that_the_page_looks_for_are_in_it():
    folder = ROOT / "hybrid_grpo/watch/page"
    page = (folder / "index.html").read_text()
    for path in folder.glob("*.js"):
        for name in re.findall(r'byId\("([^"]+)"\)', path.read_text()):
            assert f'id="{name}"' in page, f"{path.name}: {name}"


def test_a_run_that_takes_long_holds_up_no_other(tmp_path: Path) -> None:
    for name in ("slow", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1}\n')
    folders = Folders([tmp_path])
    answers, app = Answers(folders), server.application(folders)

    async def ask(run: str) -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            return (await client.get("/api/charts", params={"run": run})).status_code

    async def ask_both() -> None:
        with folders.runs["slow"].lock:
            waiting = asyncio.create_task(ask("slow"))
            assert await asyncio.wait_for(ask("other"), 5) == 200
            assert not waiting.done()
        assert await asyncio.wait_for(waiting, 5) == 200

    asyncio.run(ask_both())
    assert answers.answer("charts", QueryParams({"run": "other"})) == []


@pytest.mark.process
def test_sigterm_ends_the_server_while_it_reads(tmp_path: Path) -> None:
    """It was ignored until an answer was made."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    program = (
        "import sys, time; from pathlib import Path; from hybrid_grpo.watch import server, answers, folders\n"
        "answers.Answers.charts = lambda self, given: time.sleep(1000)\n"
        "listener = server.listen(0)\n"
        "announce = lambda: print(listener.getsockname()[1], flush=True)\n"
        "server.serve(server.application(folders.Folders([Path(sys.argv[1])])), listener, announce)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout
            port = int(process.stdout.readline())
            with socket.create_connection(("127.0.0.1", port)) as asking:
                asking.sendall(b"GET /api/charts HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
                assert httpx.get(f"http://127.0.0.1:{port}/api/runs").status_code == 200
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=5) == 0
        finally:
            process.kill()
