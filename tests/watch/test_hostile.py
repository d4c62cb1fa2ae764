"""A run's folder may come from anywhere: whatever its files hold, every question is answered soon, and in bounds."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hostile_files
import httpx
import pyarrow
import pyarrow.parquet
import pytest
from paths import ROOT
from starlette.datastructures import QueryParams

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.records import json_lines
from hybrid_grpo.watch import rollouts, server
from hybrid_grpo.watch.answers import QUESTIONS, Answers
from hybrid_grpo.watch.folders import Folders
from hybrid_grpo.watch.frozen import write_report

DEEP = "[" * 900 + "]" * 900
VALUES = [
    *("null", "true", "-1", "1e999", "-1e999", "NaN", "9" * 4000, "1" + "0" * 30, "0.5", "3", '""', '"\\ud800"', "[]"),
    *("{}", "[[]]", '{"a": [1, "b"]}', '[{"role": 3}]', '"' + "x" * 5000 + '"', DEEP, '[[1, 2, 3]]', '[["a", 1]]'),
]  # fmt: skip
FILES = {
    "metrics.jsonl": ("step", "reward/mean", "time/step_s", "eval/a/accuracy", "completion/sampled_tokens", "x" * 400),
    "details.jsonl": ("step", "prompts", "histograms", "stages", "decoder", "edges"),
    "alarms.jsonl": ("step", "since", "alarm", "message"),
    "rollouts/step_000003.jsonl": (
        *("step", "group", "sample", "prompt", "completion", "messages", "reward", "finish", "prompt_id", "length"),
    ),
}
GOOD = {
    "metrics.jsonl": {"step": 1, "reward/mean": 0.5, "time/step_s": 1.0},
    "details.jsonl": {"step": 1, "prompts": [[1, 0.5, 0]], "histograms": {"a": {"edges": [0, 1], "counts": [2]}}},
    "alarms.jsonl": {"step": 1, "message": "m"},
    "rollouts/step_000003.jsonl": {"group": 1, "prompt": "p", "completion": "c", "reward": 1.0},
}
ASKED = [
    {},
    {"step": "1", "offset": "0", "order": "mean", "axis": "hours", "name": ["reward/mean", "step"], "text": "p"},
    {"step": "3", "offset": "0", "first": "0", "last": "9", "low": "0", "high": "9", "points": "-1", "window": "1e30"},
    {"step": "1e30", "offset": "1e30", "rows": "1e30", "points": "1e30", "first": "-1e30", "low": "1e300"},
    {"step": "3", "offset": "7", "rows": "-5", "columns": "0", "window": "-3", "least": "-1e308", "most": "1e308"},
    {"step": "9007199254740992", "offset": "9007199254740992", "first": "nan", "name": ["\x00"], "axis": "tokens"},
]


def put(folder: Path, name: str, content: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def lines(name: str, chance: random.Random) -> bytes:
    """Good lines among some with values of other types, at any place, and garbage."""
    written = []
    for step in range(60):
        good = {key: json.dumps(value) for key, value in {**GOOD[name], "step": step}.items()}
        for key in chance.sample(FILES[name], chance.randrange(3)):
            good[key] = chance.choice(VALUES)
            if key == "histograms" and chance.random() < 0.5:
                good[key] = f'{{"a": {{"edges": {chance.choice(VALUES)}, "counts": [{chance.choice(VALUES)}]}}}}'
            if key == "prompts" and chance.random() < 0.5:
                good[key] = f"[[{chance.choice(VALUES)}, {chance.choice(VALUES)}]]"
        written.append("{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in good.items()) + "}")
        if chance.random() < 0.1:
            written.append(chance.choice([*VALUES, "", "\x00\xff", '{"step"']))
    return "\n".join(written).encode("latin1") + b"\n" + chance.choice([b"", b'{"step": 99', b"\xff"])


def huge(path: Path, begin: bytes = b"", end: bytes = b"") -> None:
    """A file of 100 MB that takes no room on the disk, with few ends of lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(100 * 10**6)
        file.seek(0, os.SEEK_END)
        file.write(end)


def hostile(name: str, folder: Path) -> None:
    good = {file: json.dumps(line).encode() + b"\n" for file, line in GOOD.items()}
    for file, line in good.items():
        put(folder, file, line)
    if name.startswith("random"):
        for file in FILES:
            put(folder, file, lines(file, random.Random(f"{name}{file}")))
    elif name == "a line of 100 MB":
        for file, line in good.items():
            huge(folder / file, line + b'{"step": 2, "a": "', b'"}\n' + line.replace(b'"step": 1', b'"step": 3'))
    elif name == "100 MB without a line":
        for file in FILES:
            huge(folder / file)
        put(folder, "metrics.jsonl", good["metrics.jsonl"])
    elif name == "empty lines":
        for file, line in good.items():
            put(folder, file, line + b"\n" * 150_000 + b"{}\n" * 50_000)
    elif name == "other kinds of files":
        for file in [file for file in FILES if file != "metrics.jsonl"]:
            (folder / file).unlink()
            (os.mkfifo if file.startswith(("alarms", "rollouts")) else os.mkdir)(folder / file)
        os.mkfifo(folder / "config.yaml")
    elif name == "files for folders":
        (folder / "rollouts/step_000003.jsonl").unlink()
        (folder / "rollouts").rmdir()
        put(folder, "rollouts", b"none")
    elif name == "many names":
        rows = (json.dumps({"step": step, **{f"n{step}/{k}": 1 for k in range(300)}}) for step in range(20))
        put(folder, "metrics.jsonl", "\n".join(rows).encode() + b"\n")
        put(folder, "rollouts/step_" + "9" * 200 + ".jsonl", good["rollouts/step_000003.jsonl"])
    elif name == "parquet":
        table = {"row": ["a", None], "sample": [b"\xff", b""], "pieces": [[1, None], []], "given": ["x", ""]}
        pyarrow.parquet.write_table(pyarrow.table(table), folder / "rollouts/step_000003.parquet")
        table = {"row": pyarrow.array([0] * 10**6), "pieces": pyarrow.array(["x"] * 10**6)}
        (folder / "replay").mkdir()
        pyarrow.parquet.write_table(pyarrow.table(table), folder / "replay/step_000003.parquet")
    else:
        put(folder, "config.yaml", CONFIGS[name])


CONFIGS = {
    "yaml of aliases": b"a0: &a0 [x]\n"
    + b"".join(b"a%d: &a%d [%s]\n" % (k, k, b",".join([b"*a%d" % (k - 1)] * 10)) for k in range(1, 12)),
    "yaml of a long text": b"a: &a " + b"x" * 500_000 + b"\nb: [" + b"*a," * 100_000 + b"]",
    "yaml of levels": b"[" * 500_000,
    "yaml of odd keys": b"{2020-01-01: {2020-01-02: 1, [1]: 2}, ? {a: 1} : 2, run: [1], 1: {null: {true: .inf}}}",
    "yaml of dates": b"run: {steps: 2020-01-01, a: {2020-01-02: [2020-01-03, !!set {a, b}, !!binary eA==]}}",
    "yaml of long names": b"".join(b"%s%d: {a: {b: 1}}\n" % (b"n" * 300, k) for k in range(1000)),
    "yaml of 40 MB": b"a: 1\n" * (8 * 10**6),
    "bytes": bytes(range(256)) * 100,
}
HUGE = ("a line of 100 MB", "100 MB without a line", "empty lines")
NAMES = [
    *(f"random {seed}" for seed in range(6)),
    *(pytest.param(name, marks=pytest.mark.process) for name in HUGE),  # which take seconds
    *("other kinds of files", "files for folders", "many names", "parquet", *CONFIGS),
]


def ask_all(folder: Path, parameters: list[Any], seconds: float) -> None:
    """Ask every question about the runs `hostile` and `other` in a folder, by processor time within `seconds` each."""
    app = server.application(Folders([folder]))

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            listed = (await client.get("/api/runs")).json()["runs"]
            assert {"hostile", "other"} <= {run["run"] for run in listed}
            for question in ("runs", *QUESTIONS):
                both = question in ("runs", "charts", "curves", "alarms", "settings")
                for given in parameters:
                    start = time.process_time()
                    asked = {**given, "run": ["hostile", "other"] if both else "hostile"}
                    answer = await client.get(f"/api/{question}", params=asked)
                    assert answer.status_code in (200, 400, 404), (question, given, answer.text[:500])
                    assert answer.headers["content-type"] == "application/json"
                    assert len(answer.content) < 2**24 and isinstance(answer.json(), dict | list | None)
                    assert hostile_files.SECRET not in answer.text
                    assert time.process_time() - start < seconds, (question, given)

    asyncio.run(ask())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", NAMES)
def test_every_question_is_answered_soon_and_in_bounds(tmp_path: Path, name: str) -> None:
    """Wrong types answered 500; a line of 400 MB held up all pages for 20 s, the settings of two runs for 30 s."""
    runs = {"hostile": tmp_path / "runs" / "hostile", "other": tmp_path / "runs" / "other"}
    hostile(name, runs["hostile"])
    put(runs["other"], "metrics.jsonl", b'{"step": 1, "reward/mean": 1.0}\n')
    put(runs["other"], "config.yaml", b"run: {steps: 3}\n")
    ask_all(tmp_path / "runs", ASKED[1:2] if name in HUGE else ASKED, seconds=3)
    report = write_report(runs["hostile"])
    assert report.stat().st_size < 2**24


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", hostile_files.CASES)
def test_files_that_once_held_up_or_misled_the_page(tmp_path: Path, name: str) -> None:
    """A MiB of directives in a config.yaml kept all threads waiting for 7 s; lines of many values took 26 s and 2 GB;
    links led out of the folder: the page showed the file, and a report overwrote it."""
    folder = hostile_files.write_run(tmp_path / "runs/hostile")
    hostile_files.write_run(tmp_path / "runs/other")
    hostile_files.CASES[name](folder)
    ask_all(tmp_path / "runs", [ASKED[0], {"step": "3", "offset": "0", "name": ["reward/mean", "step"]}], seconds=1.5)
    try:
        assert hostile_files.SECRET not in write_report(folder).read_text(errors="replace")
    except UserError as error:
        assert "\n" not in str(error)
    outside = tmp_path / "outside.txt"
    assert not outside.exists() or outside.read_text() == "mine"


def test_lines_that_are_too_long_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "LONGEST", 1000)
    monkeypatch.setattr(json_lines, "_CHUNK", 300)
    put(
        tmp_path,
        "metrics.jsonl",
        b"".join(b'{"step": %d, "a": "%s"}\n' % (k, b"x" * 2500 * (k == 1)) for k in range(4)),
    )
    put(tmp_path, "metrics.jsonl", (tmp_path / "metrics.jsonl").read_bytes().replace(b'""', b"1"))
    rows = (b'{"completion": "%d%s"}\n' % (k, b"x" * 2500 * (k == 1)) for k in range(4))
    put(tmp_path, "rollouts/step_000001.jsonl", b"".join(rows))
    answers, given = Answers(Folders([tmp_path])), {"run": tmp_path.name}
    (opened,) = answers.runs(QueryParams(given))["open"]
    assert (opened["read"], opened["damaged"]) == (1.0, 1)
    (run,) = answers._folders.runs.values()
    assert run.table.column("step").tolist() == [0, 2, 3]
    found = answers.samples(QueryParams(given))
    assert [row["completion"] for row in found["rows"]] == ["0", "2", "3"]
    assert (found["read"], found["left_out"], found["next"]) == (3, 1, None)
    begun, counted, start = [], 0, None
    while True:  # a search that is cut anywhere, also inside the long line, finds the same
        part = rollouts.search(run.rollouts(), rollouts.Query(), start, seconds=0)
        begun += [row["completion"] for row in part.rows]
        counted, start = counted + part.left_out, part.next
        if start is None:
            break
    assert (begun, counted) == (["0", "2", "3"], 1)


def test_a_run_that_takes_long_holds_up_no_other(tmp_path: Path) -> None:
    for name in ("slow", "other"):
        put(tmp_path / name, "metrics.jsonl", b'{"step": 1}\n')
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
    put(tmp_path, "metrics.jsonl", b'{"step": 1}\n')
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


def test_a_line_may_have_many_commas_in_texts_but_not_many_values() -> None:
    """A test case of a coding task is a text of many numbers; a line of 2.7 million lists kept all threads waiting."""
    text = json.dumps([1, 2] * 10**5)
    assert json_lines.parse(json.dumps({"step": 1, "tests": text}).encode()) == {"step": 1, "tests": text}
    many = 150_000
    quoted = json.dumps(["a"] * 10**5)
    assert json_lines.parse(json.dumps({"tests": quoted}).encode()) == {"tests": quoted}
    for values in ([[]] * many, [""] * many, ["a,\\"] * many, {str(key): 0 for key in range(many)}):
        assert json_lines.parse(json.dumps({"step": 1, "values": values}).encode()) is None
