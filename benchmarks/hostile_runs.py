"""Wrong, huge and hostile files in run folders: what `hybrid-grpo watch` and `hybrid-grpo report` make of them.

    python benchmarks/hostile_runs.py [--json FILE] [--large BYTES] [CASE ...]

For each case of hostile_files.py (or those whose names contain a CASE) a server is started for a folder with a healthy
run and one that the case damages, and every question of the page is asked about the damaged run, over HTTP. Meanwhile
another client asks about the healthy run. Printed are, by case, and added to
FILE if it exists:

    slowest_s     seconds that the slowest answer took, and its question
    slowest_cpu_s the most processor time that the server used during an answer; an idle machine takes as long
    server_mb     largest resident memory of the server and, beside it, of the processes that it starts
    delay_s       seconds that the slowest answer to the other client took
    faults        answers with a status of 500 or more, that are not JSON, or that have the text of a file outside
    load          processes that wanted to compute, on average over the last minute, at the end
    report_s, report_cpu_s, report_mb, report    seconds, memory and message of `report`

Ends with status 1 if a number is beyond `BOUNDS`.
"""

import argparse
import http.client
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil
from hostile_files import CASES, LINES, SECRET, write_run

ROOT = Path(__file__).parent.parent
BOUNDS = {
    "slowest_cpu_s": 2.0, "server_mb": 500, "delay_s": 0.5, "faults": 0, "report_cpu_s": 20.0, "report_mb": 1000
}  # fmt: skip
READING_S = 3.0
"""Seconds for which the page polls a run that is not read yet."""
MACHINE = f"{os.cpu_count()} CPU cores, Python {sys.version.split()[0]}"
HOSTILE, HEALTHY = "hostile", "healthy"


class Client:
    """Asks a server, and keeps the slowest answer."""

    def __init__(self, port: int, server: psutil.Process) -> None:
        self._port, self._server = port, server
        self.slowest, self.slowest_cpu, self.question = 0.0, 0.0, ""
        self.faults: list[str] = []

    def ask(self, question: str, **given: Any) -> Any:
        """The answer; None if it was refused."""
        path = f"/api/{question}?{urlencode(given, doseq=True, errors='surrogatepass')}"
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=100)
        start, cpu = time.perf_counter(), cpu_of(self._server)
        connection.request("GET", path[:60_000])
        answer = connection.getresponse()
        content = answer.read()
        took = time.perf_counter() - start
        self.slowest_cpu = max(self.slowest_cpu, cpu_of(self._server) - cpu)
        connection.close()
        if took > self.slowest:
            self.slowest, self.question = took, path[5:80]
        kind, nosniff = answer.headers.get("content-type"), answer.headers.get("x-content-type-options")
        if answer.status >= 500 or kind != "application/json" or nosniff != "nosniff" or SECRET.encode() in content:
            self.faults.append(f"{answer.status} {kind} {path[:80]}: {content[:200]!r}")
        return json.loads(content) if answer.status == 200 else None


def cpu_of(process: psutil.Process) -> float:
    """The processor seconds of a process; 0 once it has ended."""
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def ask_all(client: Client, seconds: float = READING_S) -> None:
    """Ask what the page asks about the damaged run, and what it would never ask."""
    both = [HOSTILE, HEALTHY]
    client.ask("runs")
    read_all(lambda: share(client.ask("runs", run=both)), 2)
    names = metrics(client)
    for axis in ("step", "tokens", "hours"):
        client.ask("curves", run=both, name=names, axis=axis)
    client.ask("curves", run=HOSTILE, name=names, low=-1e300, high=1e300, points=1e30, window=1e30)
    client.ask("curves", run=HOSTILE, name=names, low="1e999", axis="x")
    for _ in range(2):
        client.ask("settings", run=both)
        client.ask("alarms", run=both)
    rows = samples(client)
    for row in rows[:2] + rows[-1:]:
        for question in ("sample", "rival", "tokens"):
            client.ask(question, run=HOSTILE, step=row["step"], offset=row["offset"])
    for place in ((3, 0), (3, 7), (3, 1e15), (3, 1e30), (-1, 2**53), ("nan", "1e999")):
        for question in ("sample", "rival", "tokens", "samples"):
            client.ask(question, run=HOSTILE, step=place[0], offset=place[1])
    read_all(lambda: share(client.ask("prompts", run=HOSTILE, rows=100, columns=100)), seconds)
    for order in ("row", "mean", "last"):
        client.ask("prompts", run=HOSTILE, order=order, rows=1e30, columns=1e30, first=-1e15, last=1e15)
    for step in ("", 0, 5, 10**9, -5, 1e15):
        client.ask("step", run=HOSTILE, step=step)
    read_all(lambda: share(client.ask("runs", run=both)), seconds)
    names = metrics(client)
    client.ask("curves", run=both, name=names, axis="hours", points=4000)
    client.ask("times", run=HOSTILE)
    client.ask("runs")


def metrics(client: Client) -> list[str]:
    """The names of up to 60 metrics, as many as a tall screen shows at a time."""
    charts = client.ask("charts", run=[HOSTILE, HEALTHY]) or []
    return [curve["name"] for chart in charts for curve in chart["curves"]][:60]


def samples(client: Client) -> list[dict[str, Any]]:
    """Search as the page does: without a condition, and for a text that is rare, on and on."""
    found = []
    for text in ("", "no such TEXT"):
        start: list[Any] = [None, None]
        for _ in range(6):
            given = {"step": start[0], "offset": start[1]} if start[0] is not None else {}
            answer = client.ask("samples", run=HOSTILE, text=text, **given)
            found += answer["rows"] if answer else []
            if not answer or not answer["next"]:
                break
            start = answer["next"]
    return found


def share(answer: Any) -> float:
    """How much of the damaged run has been read."""
    if answer is None:
        return 1.0
    return min((run["read"] for run in answer["open"]), default=1.0) if "open" in answer else answer["read"]


def read_all(ask: Callable[[], float], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while ask() < 1 and time.monotonic() < deadline:
        time.sleep(0.01)


@contextmanager
def meanwhile(act: Callable[[], None] | None, pause: float = 0.05) -> Iterator[None]:
    """Call a function over and over in another thread."""
    ended = threading.Event()

    def loop() -> None:
        while act and not ended.wait(pause):
            act()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A process of hybrid-grpo; that of root is not allowed to ignore permissions."""
    plain = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []
    program = [*plain, sys.executable, "-m", "hybrid_grpo", *arguments]
    return subprocess.Popen(program, text=True, cwd=ROOT, **options)


def peak_mb(pid: int) -> float:
    """The largest resident memory that a process has had, in MB of 2**20 bytes; 0 once it has ended."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    return 0.0


def served(folder: Path, log: Path, change: Callable[[], None] | None) -> dict[str, Any]:
    """Ask a server everything about the runs in a folder; `log` is where it writes its messages."""
    with log.open("w") as file:
        process = command("watch", str(folder), "--watch.port", "0", stderr=file)
    largest = 0.0
    try:
        start = time.perf_counter()
        while not log.read_text().endswith("\n"):
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        started = time.perf_counter() - start
        port = int(log.read_text().split()[0].rpartition(":")[2])
        server = psutil.Process(process.pid)
        client, other = Client(port, server), Client(port, server)

        def ask_other() -> None:
            nonlocal largest
            other.ask("runs", run=HEALTHY)
            other.ask("curves", run=HEALTHY, name=list(LINES["metrics.jsonl"]))
            with suppress(psutil.Error):
                pids = [process.pid, *(child.pid for child in server.children(recursive=True))]
                largest = max(largest, *map(peak_mb, pids))

        with meanwhile(change), meanwhile(ask_other):
            ask_all(client)
        largest = max(largest, peak_mb(process.pid))
    finally:
        process.kill()
        process.wait()
    faults = client.faults + other.faults + ([log.read_text()[-500:]] if "Traceback" in log.read_text() else [])
    return {
        "start_s": round(started, 1), "slowest_s": round(client.slowest, 2), "question": client.question,
        "slowest_cpu_s": round(client.slowest_cpu, 2),
        "server_mb": round(largest), "delay_s": round(other.slowest, 2),
        "faults": len(faults), "first_fault": faults[0] if faults else None,
    }  # fmt: skip


def reported(folder: Path, log: Path, change: Callable[[], None] | None) -> dict[str, Any]:
    """Write the report of a run."""
    start, largest, cpu = time.perf_counter(), 0.0, 0.0
    with meanwhile(change), log.open("w") as file:
        process = command("report", str(folder), stdout=subprocess.DEVNULL, stderr=file)
        while process.poll() is None and time.perf_counter() - start < 60:
            cpu = max(cpu, cpu_of(psutil.Process(process.pid)))
            largest = max(largest, peak_mb(process.pid))
            time.sleep(0.02)
        took = time.perf_counter() - start
        process.kill()
        process.wait()
    report, said = folder / "report.html", log.read_text()
    clear = process.returncode == 0 or (process.returncode == 2 and said.count("\n") == 1)
    secret = report.is_file() and SECRET in report.read_text(errors="replace")
    return {
        "report_s": round(took, 1), "report_cpu_s": round(cpu, 1), "report_mb": round(largest),
        "faults": (not clear) + secret,
        "report": "written" if process.returncode == 0 else said.strip().replace(str(folder), "RUN")[-300:],
    }  # fmt: skip


def measure(name: str, large: int, place: Path) -> dict[str, Any]:
    folder = place / "runs"
    write_run(folder / HEALTHY, 1000)
    change = CASES[name](write_run(folder / HOSTILE), large)
    found = served(folder, place / "watch.txt", change)
    report = reported(folder / HOSTILE, place / "report.txt", change)
    outside = place / "outside.txt"
    overwritten = outside.exists() and outside.read_text() != "mine"
    return {
        **found,
        **report,
        "load": round(os.getloadavg()[0], 1),
        "faults": found["faults"] + report["faults"] + overwritten,
    }


def beyond(found: dict[str, Any]) -> list[str]:
    return [name for name, bound in BOUNDS.items() if found[name] > bound]


def summary(results: dict[str, dict[str, Any]], large: int) -> dict[str, Any]:
    return {
        "command": "python benchmarks/hostile_runs.py", "machine": MACHINE, "cases": len(results), "large": large,
        "worst": {key: max(found[key] for found in results.values()) for key in BOUNDS},
        "beyond": [name for name, found in results.items() if beyond(found)],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--large", type=int, default=10**9)
    parser.add_argument("cases", nargs="*")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    results: dict[str, dict[str, Any]] = {}
    if given.json and given.json.exists():
        results = json.loads(given.json.read_text())["by_case"]
    for name in [name for name in CASES if not given.cases or any(part in name for part in given.cases)]:
        place = Path(tempfile.mkdtemp())
        try:
            results[name] = measure(name, given.large, place)
        finally:
            shutil.rmtree(place)
        print(beyond(results[name]) or "ok", name, results[name], flush=True)
        if given.json:
            given.json.write_text(json.dumps({**summary(results, given.large), "by_case": results}, indent=1) + "\n")
    print(json.dumps(summary(results, given.large), indent=1))
    sys.exit(any(map(beyond, results.values())))


if __name__ == "__main__":
    main()
