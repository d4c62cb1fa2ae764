"""Put random faults into the code, one at a time, and count those that the tests find.

    python benchmarks/mutation.py --faults 30                    a sample
    python benchmarks/mutation.py --seed 0 --faults 300 --json   numbers for benchmarks/results/mutation.json
    python benchmarks/mutation.py --files generation model       other files, here those of the engine

It needs the extra `bench`. A fault is one of mutmut's changes at one place of FILES, or of what `--files` names;
benchmarks/mutation_faults.py lists what is left out. Every place is equally likely. The tests are run once to measure
which lines each of them covers (kept in --work until code or tests change). For each fault, the tests that cover its
lines are run, those that mirror its file first, until one fails; then the survivors are tried with the tests that start
processes. Everything runs in copies of the checkout, and tests are forked from one process that has imported torch.

A fault is found if a test fails, the tests cannot be collected, or two tests hang. With the same --work a fault is not
tried again while its file and the tests are unchanged, so an interrupted run continues, and after new tests only the
survivors are tried. Each survivor shows a missing test, dead code, or a change without effect.
"""

import argparse
import compileall
import ctypes
import hashlib
import importlib
import json
import math
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from machine import machine, save

ROOT = Path(__file__).resolve().parent.parent
FILES = ("grpo", "turns", "run", "data/packing.py", "generation/scheduler.py")
TESTS = ("grpo", "turns", "run", "model", "data", "generation", "features", "rewards", "config", "commands")
"""Folders of tests; top-level tests are included too, except those of pages and scripts."""
TOP = ("engine", "gpu_start", "policy", "trainer")
NO_MORE_S = 60.0
"""The most seconds, without a fault, of the tests for one: of those that start no process, and again of the others."""
LAST = "test_bad_inputs"
"""Parts of names of tests that are many, and end before a model is loaded."""
WARM = (
    *("torch", "transformers", "datasets", "deepspeed.runtime.zero.muon.muon_optimizer", "peft", "pytest"),
    *("coverage", "hypothesis", "pyarrow.parquet", "starlette.applications", "httpx", "wandb", "pydantic", "rich"),
    *("torch._dynamo", "transformers.models.qwen2.modeling_qwen2", "transformers.models.llama.modeling_llama"),
)
"""Third-party modules that tests import; those not installed are left out."""
ENVIRONMENT = {
    **{"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    **{"TRITON_INTERPRET": "1", "TORCH_WARM_POOL": "0", "SKIP_SETUP": "1"},
}

Entry = dict[str, Any]


class Copy:
    """A copy of the checkout for running tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")[:-1]:
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        # A changed file may have the size and modification second of the old one.
        checked = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / "hybrid_grpo", quiet=1, invalidation_mode=checked)

    @contextmanager
    def changed(self, file: str, code: str) -> Iterator[None]:
        """Within the context the file has other content."""
        path = self.folder / file
        before = path.read_text()
        path.write_text(code)
        try:
            yield
        finally:
            path.write_text(before)

    def pytest(
        self, arguments: list[str], make_plugin: Callable[[], object], log: Path, limit_s: float, running: Path
    ) -> int | None:
        """Exit status of pytest in a fork of this process; None if it takes longer than `limit_s` seconds, or a test
        longer than the file `running` allows (see `mutation_tests.Chosen`)."""
        if not (pid := os.fork()):
            with suppress(BaseException):
                os._exit(self._pytest(arguments, make_plugin, log))
            os._exit(3)
        end = time.monotonic() + limit_s
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > min(end, _deadline(running)):
                _end_children()
                return None
            time.sleep(0.05)
        _end_children()
        return os.waitstatus_to_exitcode(ended[1])

    def _pytest(self, arguments: list[str], make_plugin: Callable[[], object], log: Path) -> int:
        import pytest

        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        os.chdir(self.folder)
        sys.path.insert(0, str(self.folder))
        assert "hybrid_grpo" not in sys.modules
        options = ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir=."]
        return int(pytest.main([*options, *arguments], plugins=[make_plugin()]))


def _deadline(running: Path) -> float:
    with suppress(OSError, ValueError, IndexError):
        return float(running.read_text().split()[0])
    return math.inf


def _end_children() -> None:
    import psutil

    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0]:
                pass


class Slots:
    """Runs tasks in forks, as many at a time as there are copies of the checkout."""

    def __init__(self, copies: list[Copy]) -> None:
        self._free, self._busy = list(copies), dict[int, Copy]()

    def start(self, task: Callable[[Copy], None]) -> None:
        """Run a task in a fork as soon as a copy is free."""
        if not self._free:
            self._wait()
        copy = self._free.pop()
        if not (pid := os.fork()):
            try:
                # Processes that tests leave become children of this process, which can end them.
                ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
                task(copy)
            except Exception:
                traceback.print_exc()
            finally:
                _end_children()
                sys.stdout.flush()
                os._exit(0)
        self._busy[pid] = copy

    def join(self) -> None:
        """Wait for all tasks."""
        while self._busy:
            self._wait()

    def end(self) -> None:
        """End all tasks, and the processes they have started."""
        for pid in self._busy:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self.join()

    def _wait(self) -> None:
        # Imported modules may have child processes of their own.
        while (pid := os.wait()[0]) not in self._busy:
            pass
        self._free.append(self._busy.pop(pid))


def measured(work: Path, files: list[str], slots: Slots, slow: bool) -> Entry:
    """`mutation_tests.merged` for the tests that start processes, or for all others. Tests are measured again if they,
    the code or their support modules have changed."""
    import mutation_tests

    tests = [str(path.relative_to(ROOT)) for name in TESTS for path in (ROOT / "tests" / name).rglob("test_*.py")]
    tests = sorted([*tests, *(f"tests/test_{name}.py" for name in TOP)])
    any_of = " or ".join(mutation_tests.SLOW)
    if slow:
        marked = [test for test in tests if any(mark in (ROOT / test).read_text() for mark in mutation_tests.SLOW)]
        parts = [(f"({any_of}) and not gpu", [test], 900.0) for test in marked]
    else:
        parts = [(f"not ({any_of} or gpu)", tests[part::4], 1800.0) for part in range(4)]
    code = _hash(*_sources("hybrid_grpo"), *_sources("tests/support"))
    folders = []
    for marks, some, limit_s in parts:
        folder = work / "coverage" / _hash(code, marks, *files, *some, *((ROOT / test).read_text() for test in some))
        folders.append(folder)
        if (folder / "done").exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

        def measure(
            copy: Copy, marks: str = marks, some: list[str] = some, limit_s: float = limit_s, folder: Path = folder
        ) -> None:
            def plugin() -> object:
                return mutation_tests.Measured(folder, [str(copy.folder / file) for file in files])

            status = copy.pytest(["-m", marks, *some], plugin, work / "measured.log", limit_s, work / "none")
            (folder / "done").touch()
            told = "" if status in (0, 1, 5) else f"; ended with {status}: they are not used"
            print(f"measured: {some[0]}{f' and {len(some) - 1} others' if some[1:] else ''}{told}", flush=True)

        slots.start(measure)
    slots.join()
    return mutation_tests.merged(folders, files)


def chosen(tests: Entry, file: str, lines: tuple[int, int]) -> list[str]:
    """The tests that cover the lines, or else any line of the file: first those that mirror the file, then the
    cheapest, including shared fixtures.

    Lines that run on import alone belong to no test.
    """
    by_line = tests["lines"].get(file, {})
    found = {test for line in range(lines[0], lines[1] + 1) for test in by_line.get(str(line), ())}
    if not found:
        found = {test for of in by_line.values() for test in of}
    mirror = f"tests/{file.removeprefix('hybrid_grpo/').removesuffix('.py')}".replace(
        Path(file).stem, f"test_{Path(file).stem}"
    )
    known = {test: tests["tests"][test] for test in found}
    usable = [test for test, of in known.items() if of["passed"]]
    usable.sort(key=lambda test: (not test.startswith(mirror), LAST in test, known[test]["longest"], test))
    seconds, taken, begun = 0.0, list[str](), set[str]()
    for test in usable:
        of_file = test.split("::")[0]
        seconds += known[test]["seconds" if of_file in begun else "longest"]
        begun.add(of_file)
        if taken and seconds > NO_MORE_S:
            break
        taken.append(test)
    return taken


def tried(fault: Any, tests: Entry, run: list[str], copy: Copy, work: Path) -> Entry:
    """The outcome of a fault: `result` is found, hung or survived; `by` is the test that found it."""
    import mutation_tests

    start = time.monotonic()
    entry = {"file": fault.file, "line": fault.lines[0], "kind": fault.kind, "diff": fault.diff, "tests": len(run)}
    running, log = work / f"running_{os.getpid()}", work / f"log_{os.getpid()}"
    seconds = {test: tests["tests"][test]["longest"] for test in run}
    least, times = (60.0, 5.0) if any(tests["tests"][test]["slow"] for test in run) else (15.0, 10.0)
    entry["result"], hung = "survived", list[str]()
    # One test may hang because the machine is slow; a real hang affects two.
    while len(hung) < 2 and (left := [test for test in run if test not in hung]):
        plugin = mutation_tests.Chosen({test: least + times * seconds[test] for test in left}, running)
        files = list(dict.fromkeys(test.split("::")[0] for test in left))
        running.unlink(missing_ok=True)
        with copy.changed(fault.file, fault.code):
            limit_s = 120.0 + times * sum(seconds[test] for test in left)
            status = copy.pytest(["-x", *files], lambda plugin=plugin: plugin, log, limit_s, running)
        if status == 0:
            break
        if status in (_USAGE, _NO_TESTS):
            raise RuntimeError(f"no test was run: {log.read_text()}")
        by = running.read_text().partition(" ")[2] if running.exists() else "collecting the tests"
        if status is not None:
            entry |= {"result": "found", "by": by}
            break
        hung.append(by)
    if len(hung) > 1:
        entry |= {"result": "hung", "by": hung[-1]}
    for path in (running, log):
        path.unlink(missing_ok=True)
    return {**entry, "seconds": round(time.monotonic() - start, 1)}


_USAGE, _NO_TESTS = 4, 5
"""Of pytest's exit statuses."""


def _key(fault: Any) -> str:
    return _hash(fault.file, fault.code)


def _content(tests: list[str]) -> str:
    files = sorted({test.split("::")[0] for test in tests})
    return _hash(*tests, *((ROOT / file).read_text() for file in files if (ROOT / file).is_file()))


def _still_holds(entry: Entry, run: list[str]) -> bool:
    """Whether the result still holds: the test that found the fault, or those that did not, are unchanged."""
    if entry["result"] == "survived":
        return _content(run) in entry["against"]
    return entry["against"] == [_content([entry["by"]])]


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _sources(folder: str) -> list[str]:
    return [path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))]


def main() -> None:
    options = parse()
    import mutation_faults

    os.environ |= ENVIRONMENT
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options.work.mkdir(parents=True, exist_ok=True)
    files = [str(path.relative_to(ROOT)) for name in options.files for path in _files(ROOT / "hybrid_grpo" / name)]
    faults, places = mutation_faults.draw(ROOT, files, options.faults, options.seed)
    for module in WARM:
        with suppress(ImportError):
            importlib.import_module(module)
    slots = Slots([Copy(options.work / f"copy_{number}") for number in range(options.workers)])
    record = options.work / "faults.jsonl"
    record.touch()
    broken, reached = 0, "none"
    try:
        for slow in (False,) if options.fast else (False, True):
            tests = measured(options.work, files, slots, slow)
            reached = "all" if slow else "fast"
            unusable = sum(not of["passed"] for of in tests["tests"].values())
            broken += unusable
            print(f"{places} places; {len(tests['tests'])} tests, of which {unusable} do not pass and are not used")
            _try_all(faults, tests, slots, options.work)
    finally:
        slots.end()
        known = _read(record)
        report([known[_key(fault)] for fault in faults if _key(fault) in known], options, places, broken, reached)


def _try_all(faults: list[Any], tests: Entry, slots: Slots, work: Path) -> None:
    known = _read(work / "faults.jsonl")
    for number, fault in enumerate(faults):
        run, before = chosen(tests, fault.file, fault.lines), known.get(_key(fault))
        if before and (not run or _still_holds(before, run)):
            continue
        earlier = before if before and before["result"] == "survived" else {"tests": 0, "against": []}

        def attempt(
            copy: Copy, fault: Any = fault, number: int = number, run: list[str] = run, earlier: Entry = earlier
        ) -> None:
            entry = tried(fault, tests, run, copy, work)
            survived = entry["result"] == "survived"
            against = [*earlier["against"], _content(run)] if survived else [_content([entry["by"]])]
            entry |= {"key": _key(fault), "tests": earlier["tests"] + len(run), "against": against}
            with (work / "faults.jsonl").open("a") as lines:
                lines.write(json.dumps(entry) + "\n")
            told = f"{number:4} {entry['result']:8} {entry['seconds']:6.1f} s  {fault.file}:{fault.lines[0]}"
            print(told, flush=True)

        slots.start(attempt)
    slots.join()


def _read(record: Path) -> dict[str, Entry]:
    return {entry["key"]: entry for entry in map(json.loads, record.read_text().splitlines())}


def report(entries: list[Entry], options: argparse.Namespace, places: int, broken: int, reached: str) -> None:
    """Print what survived, and how many were found."""
    survivors = [entry for entry in entries if entry["result"] == "survived"]
    for entry in survivors:
        print(f"\nsurvived {entry['tests']} tests: {entry['file']} ({entry['kind']})\n{entry['diff']}")
    found = len(entries) - len(survivors)
    print(f"\n{found} of {len(entries)} faults found: {found / max(1, len(entries)):.1%}")
    if not options.json or not entries:
        return
    plain = ("file", "line", "kind", "diff", "tests", "by", "seconds")
    result = {
        **{"seed": options.seed, "tests": reached, "places": places, "asked": options.faults},
        **{"faults": len(entries), "found": found},
        "hung": sum(entry["result"] == "hung" for entry in entries),
        "found_share": round(found / len(entries), 3),
        "tests_that_did_not_pass": broken,
        "survivors": [{name: entry[name] for name in plain if name in entry} for entry in survivors],
        "machine": machine("pytest", "mutmut"),
    }
    save(options.json, result)


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the faults that are drawn")
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--files", nargs="+", default=FILES, help="files and folders of hybrid_grpo")
    parser.add_argument("--fast", action="store_true", help="leave out the tests that start processes: a lower bound")
    parser.add_argument("--workers", type=int, default=2, help="faults tried at a time")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "hybrid_grpo_mutation")
    results = ROOT / "benchmarks/results/mutation.json"
    parser.add_argument("--json", type=Path, nargs="?", const=results, help="default: benchmarks/results/mutation.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
