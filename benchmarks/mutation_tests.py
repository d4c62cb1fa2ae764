"""The tests as benchmarks/mutation.py runs them: all of them once to measure them, then those of a fault in order.

A fixture of a module or a session runs in the first test that uses it, and is counted for all tests that do. Programs
that tests fork (tests/support/forks.py) are measured too, including the ranks that they fork; programs started in other
ways, or killed, are not.
"""

import functools
import json
import multiprocessing.util
import os
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import coverage
import pytest

SLOW = ("ranks", "process")
"""Marks of tests that start processes."""


def _coverage(data: Path, files: Sequence[str], context: str) -> coverage.Coverage:
    name = str(data / f"{os.getpid()}_{time.monotonic_ns()}")
    # The suffix identifies the process, also one that is forked during the measurement.
    return coverage.Coverage(name, data_suffix=True, include=list(files), config_file=False, context=context)


def _measured(data: Path, files: Sequence[str], context: str, *arguments: Any) -> None:
    """A forked program of a test: saves its measurement when it ends, normally or by `os._exit`, as ranks do."""
    import forks

    measure, leave = _coverage(data, files, context), os._exit
    measure.start()

    def save() -> None:
        measure.stop()
        measure.save()

    def save_and_leave(status: int) -> None:
        with suppress(Exception):
            save()
        leave(status)

    multiprocessing.util.Finalize(None, save, exitpriority=100)
    os._exit = save_and_leave  # type: ignore[assignment]
    forks._main(*arguments)


class Measured:
    """Measures each test: seconds, whether it passes, and the lines of `files` that it runs.

    Args:
        data: folder of the measurements, for `merged`.
    """

    def __init__(self, data: Path, files: Sequence[str]) -> None:
        self._data, self._files = data, files
        self._tests: dict[str, dict[str, Any]] = {}
        self._cover = _coverage(data, files, "")
        self._cover.start()

    def pytest_sessionfinish(self) -> None:
        self._cover.stop()
        self._cover.save()
        (self._data / f"{os.getpid()}.json").write_text(json.dumps(self._tests))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        slow = any(item.get_closest_marker(mark) for mark in SLOW)
        self._tests[item.nodeid] = {"seconds": 0.0, "passed": True, "slow": slow, "fixtures": self._wide(item)}
        self._switch(item.nodeid)
        result = yield
        self._switch("")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._context
        self._switch(_name(fixturedef))
        try:
            return (yield)
        finally:
            self._switch(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests[report.nodeid]
        test["seconds"] += report.duration
        test["passed"] &= not report.failed
        test["passed"] &= not (report.skipped and not hasattr(report, "wasxfail"))

    def _switch(self, context: str) -> None:
        import forks

        self._context = context
        self._cover.switch_context(context)
        forks._main = functools.partial(_measured, self._data, self._files, context)  # type: ignore[assignment]

    def _wide(self, item: pytest.Item) -> list[str]:
        found = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
        return [_name(d) for definitions in found for d in definitions if d.scope != "function"]


def _name(fixturedef: Any) -> str:
    return f"fixture {fixturedef.baseid} {fixturedef.argname}"


def merged(folders: Sequence[Path], files: Sequence[str]) -> dict[str, Any]:
    """All measurements: `tests` by name, and `lines`: for each file and line the tests and fixtures that run it.
    `longest` is a test's seconds including the shared fixtures."""
    tests: dict[str, dict[str, Any]] = {}
    data = [path for folder in folders for path in folder.iterdir() if path.name != "done"]
    for path in data:
        if path.suffix == ".json":
            tests |= json.loads(path.read_text())
    users = defaultdict(set)
    for test, known in tests.items():
        for fixture in known["fixtures"]:
            users[fixture].add(test)
    longest = {fixture: max(tests[test]["seconds"] for test in of) for fixture, of in users.items()}
    for known in tests.values():
        known["longest"] = max([known["seconds"], *(longest[fixture] for fixture in known["fixtures"])])
    lines: dict[str, dict[int, set[str]]] = {file: defaultdict(set) for file in files}
    for path in data:
        if path.suffix == ".json":
            continue
        measured = coverage.CoverageData(str(path))
        measured.read()
        for seen in measured.measured_files():
            file = next(file for file in files if seen.endswith(f"/{file}"))
            for line, contexts in measured.contexts_by_lineno(seen).items():
                for context in contexts:
                    lines[file][line] |= users[context] if context in users else {context} & tests.keys()
    plain = {file: {str(line): sorted(found) for line, found in of.items() if found} for file, of in lines.items()}
    return {"tests": tests, "lines": plain}


class Chosen:
    """Runs the given tests alone, in their order, until one fails.

    Args:
        limits: seconds for each test, by name.
        running: a file that has the name of the test under way, or of the one that failed, and when (by the monotonic
            clock) it should have ended.
    """

    def __init__(self, limits: dict[str, float], running: Path) -> None:
        self._limits, self._running = limits, running

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = {test: number for number, test in enumerate(self._limits)}
        items[:] = sorted((i for i in items if i.nodeid in order), key=lambda item: order[item.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        # A thread watching the clock would change what tests see of the process.
        self._running.write_text(f"{time.monotonic() + self._limits[item.nodeid]} {item.nodeid}")
