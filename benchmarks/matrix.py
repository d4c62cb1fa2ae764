"""Train with combinations of settings that together contain every pair of values, and check each run's promises.

    python benchmarks/matrix.py                        all cases, two at a time: twenty minutes on two cores
    python benchmarks/matrix.py --cases 3,17           only these
    python benchmarks/matrix.py --only 5               five that are drawn by the commit
    python benchmarks/matrix.py --json [FILE]          numbers into a file, by default benchmarks/results/matrix.json

Every case is a real run of three steps with a tiny model, in micro-batches so small that ranks have different numbers
of them. It must

    finish   on its number of ranks
    agree    with a run on another number: the same rollouts, loss within 1e-5, gradient norm within 5e-5 (see `agree`)
    resume   killed at a point that its number decides: to the bit as the run that was never killed, but where a turn
             waits for answers, which come at other moments: then as on another number of ranks
    leave    no process, no shared memory, and no file outside its folder

Pairs that cannot be combined are results too: each must be refused in one line before a model loads.
"""

import argparse
import json
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

from fault_bench import PROGRAM, Bench, started
from forks import Ranks
from machine import save
from matrix_cases import DIMENSIONS, ROOT, Case, Pair, arguments, make_task, pairs, refused_pairs

CANDIDATES = 10
"""Rows that the generator draws for each that it keeps."""
TOLERANCE = 1e-5
"""Tolerance of losses on another number of ranks, in float32: absolute below 1, relative above."""
HALF, HALF_LATER = 2e-2, 0.1
"""The same in bfloat16, whose numbers have 8 bits: 4e-3 relative for every rounding; and where the step has several
optimizer steps, the later of which begin with weights that differ."""
NORMS = 5e-5
"""Tolerance of gradient norms in float32, which differ more once weights do."""
KILLS = (("scoring", 3), ("update", 2), ("saving", 2), ("logging", 2))
"""Points of fault_program.py at which cases are killed, in turn."""
GONE_S = 15.0
"""Seconds until all processes of a run must be gone."""
AT_ONCE = 2
"""Cases at a time, since a rank mostly waits."""

Entry = dict[str, Any]


def covering(seed: int = 0) -> list[Case]:
    """Cases that together contain every pair of values that can be combined. Greedy: of some random rows, the one with
    most pairs that no earlier row has."""
    draw, every = random.Random(seed), pairs()
    left = {pair: None for pair, possible in every.items() if possible}
    cases = []
    while left:
        rows = [_row(draw, every, left) for _ in range(CANDIDATES)]
        best = max(filter(None, rows), key=lambda row: len(_gained(row, left)))
        for pair in _gained(best, left):
            del left[pair]
        cases.append({dimension: best[dimension] for dimension in DIMENSIONS})
    return cases


def _row(draw: random.Random, every: Mapping[Pair, bool], left: Collection[Pair]) -> Case | None:
    """A case that contains an uncovered pair. Each further dimension gets the value with most uncovered pairs; None if
    no value is possible."""
    row: Case = dict(sorted(draw.choice(list(left))))
    for dimension in draw.sample(list(DIMENSIONS), len(DIMENSIONS)):
        if dimension not in row:
            values = draw.sample(list(DIMENSIONS[dimension]), len(DIMENSIONS[dimension]))
            with_row = {v: [frozenset((choice, (dimension, v))) for choice in row.items()] for v in values}
            fits = {v: sum(pair in left for pair in new) for v, new in with_row.items() if all(map(every.get, new))}
            if not fits:
                return None
            row[dimension] = max(fits, key=lambda value: fits[value])
    return row


def _gained(row: Case, left: Collection[Pair]) -> list[Pair]:
    """The uncovered pairs of a row."""
    return [pair for pair in map(frozenset, combinations(row.items(), 2)) if pair in left]


class Matrix(Bench):
    """A folder with the task, for running cases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_task(folder)

    def ranks(self, name: str, *settings: str, world: int = 2, fault: dict[str, Any] | None = None) -> Ranks:
        """As in `Bench`, with a temporary folder for each run."""
        temporary = self.folder / name / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        environment = {"FAULT": json.dumps(fault), "TMPDIR": str(temporary)}
        return Ranks(PROGRAM, *self.arguments(name, *settings), world=world, cwd=self.folder, environment=environment)

    def end(self, name: str, settings: Sequence[str], world: int) -> tuple[int, str]:
        """Start a run and wait for its end. Returns status and output; raises AssertionError if it leaves something
        behind."""
        with self.ranks(name, *settings, world=world) as ranks:
            status = ranks.wait(300)
            self.gone_after(GONE_S)
        assert not (left := _shared_memory(ranks)), f"{left} is left in shared memory"
        beside = [path for path in (self.folder / name).iterdir() if path.name not in ("run", "tmp")]
        beside += (self.folder / name / "tmp").iterdir()
        assert not beside, f"{[str(path) for path in beside]} is left outside the run"
        return status, "".join(ranks.output)

    def tried(self, number: int, case: Case) -> Entry:
        """One case, in a folder of its own; a failure is its `why`."""
        start, name = time.monotonic(), f"case_{number}"
        try:
            entry: Entry = {"outcome": "passed", **self._case(name, number, case)}
        except Exception as error:  # whatever it is, its slot is given back
            entry = {"outcome": "failed", "why": repr(error)}
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return {"case": number, **entry, "seconds": round(time.monotonic() - start, 1), "settings": case}

    def _case(self, name: str, number: int, case: Case) -> Entry:
        settings, world, whole_rows = arguments(case), int(case["ranks"]), arguments({**case, "split": "whole rows"})
        another = 1 if world > 1 else 2 + number % 2
        self.whole = self.finished(f"{name}/whole", *self.end(f"{name}/whole", settings, world))
        other = self.finished(f"{name}/other", *self.end(f"{name}/other", whole_rows, another))
        apart = agree(self.whole, other, case)
        point, nth = KILLS[number % len(KILLS)]
        fault = {"point": point, "nth": nth, "rank": "all", "action": "kill"}
        with self.ranks(f"{name}/killed", *settings, world=world, fault=fault) as ranks:
            started(ranks)
            self.gone_after(GONE_S)
        assert not (left := _shared_memory(ranks)), f"{left} is left in shared memory"
        shutil.rmtree(self.folder / name / "killed" / "tmp")
        ended = self.end(f"{name}/killed", settings, world)
        if case["turns"] == "one":
            self.same(f"{name}/killed", *ended)
        else:
            # Answers that arrive together are read in one forward, which rounds log-probabilities.
            agree(self.whole, self.finished(f"{name}/killed", *ended), case)
        resumed = "to the bit" if case["turns"] == "one" else "as on other ranks"
        return {"on": another, "apart": apart, "killed": f"{point} {nth}", "resumed": resumed}

    def same(self, name: str, status: int, said: str) -> None:
        """As in `Bench`, but names the numbers that differ."""
        ours, differ = self.finished(name, status, said), []
        for key in sorted(ours.keys() | self.whole.keys()):
            one, other = ours.get(key), self.whole.get(key)
            if isinstance(one, dict) and isinstance(other, dict):
                differ += [f"{n} of {key}" for n in sorted(one.keys() | other.keys()) if one.get(n) != other.get(n)]
            elif one != other:
                differ.append(key)
        assert not differ, f"resumed, {len(differ)} differ: {', '.join(differ[:12])}"

    def refused(self, number: int, pair: Pair) -> Entry:
        """A pair of values that cannot be combined, with the first value of every other dimension."""
        start, name, case = time.monotonic(), f"pair_{number}", {**{d: next(iter(DIMENSIONS[d])) for d in DIMENSIONS}}
        case = case | ({"ranks": "2"} if ("split", "shared rows") in pair else {}) | dict(pair)
        status, said = self.end(name, arguments(case), world=int(case["ranks"]))
        why = said.strip().removeprefix("hybrid-grpo: error: ")
        one_line = status == 2 and "\n" not in why and not (self.folder / name / "run").exists()
        shutil.rmtree(self.folder / name)
        entry = {"outcome": "refused", "why": why[-600:]}
        entry |= {} if one_line else {"outcome": "failed", "why": f"status {status}: {why[-600:]}"}
        return {"pair": number, **entry, "seconds": round(time.monotonic() - start, 1), "settings": dict(sorted(pair))}


def _shared_memory(ranks: Ranks) -> list[str]:
    """Shared memory left by ended processes, recognized by their port or ids in its names."""
    numbers = "|".join([ranks.port, *(str(process.pid) for process in ranks.processes)])
    found = re.compile(rf"(?<!\d)({numbers})(?!\d)")
    return [path.name for path in Path("/dev/shm").iterdir() if found.search(path.name)]


def agree(whole: dict[str, Any], other: dict[str, Any], case: Case) -> float:
    """The largest difference of losses and gradient norms of two runs on different numbers of ranks; raises
    AssertionError if it exceeds the tolerance, or if a completion differs.

    In bfloat16 only the first step is compared: gradients are summed over ranks in 8 bits, so that the weights of later
    steps differ, and with them what is sampled. An agent's requests come at any moment, which decides what is read
    together, and how that is rounded: there nothing is compared.
    """
    half = case["dtype"] == "bfloat16"
    worst = 0.0
    assert other["steps"] == whole["steps"], f"steps {other['steps']}"
    most = None if not half else 0 if case["turns"] == "agent" else (whole["steps"][0] == 0) + 1
    for step in whole["steps"][:most]:
        rollouts = [_sampled(left.get(f"rollouts/step_{step:06d}.jsonl", b"")) for left in (whole, other)]
        assert rollouts[0] == rollouts[1], f"other completions in step {step}"
        ours, theirs = (left[f"metrics of step {step}"] for left in (whole, other))
        for name in ("policy/loss", "policy/grad_norm"):
            assert (name in ours) == (name in theirs), f"{name} of step {step} on one of two numbers of ranks"
            if name in ours:
                worst = max(worst, apart := abs(ours[name] - theirs[name]) / max(1.0, abs(ours[name])))
                exact = NORMS if name.endswith("grad_norm") else TOLERANCE
                limit = exact if not half else HALF if case["passes"] == "1" else HALF_LATER
                assert apart <= limit, f"{name} of step {step} differs by {apart:.1e}: {ours[name]} and {theirs[name]}"
    return worst


def _sampled(lines: bytes) -> list[Any]:
    """The completions of a step, in the order of prompts."""
    names = ("prompt_id", "sample", "prompt", "completion", "messages", "length", "finish", "guest")
    rows = [[row.get(name) for name in names] for row in map(json.loads, lines.splitlines())]
    return sorted(rows, key=json.dumps)


def drawn(numbers: Sequence[int], count: int) -> list[int]:
    """`count` of the cases, drawn by the checked-out commit; without git always the same."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout if shutil.which("git") else ""
    return sorted(random.Random(commit).sample(numbers, min(count, len(numbers))))


def main() -> int:
    """Run the chosen cases; the status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", help="numbers of cases, as in 3,17")
    parser.add_argument("--only", type=int, metavar="N", help="N cases that are drawn by the commit")
    parser.add_argument("--json", type=Path, nargs="?", const=ROOT / "benchmarks/results/matrix.json")
    options = parser.parse_args()
    cases, impossible = covering(), refused_pairs()
    chosen, some = list(range(len(cases))), bool(options.cases or options.only)
    if some:
        chosen = [int(n) for n in options.cases.split(",")] if options.cases else drawn(chosen, options.only)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as threads:
        free = queue.SimpleQueue[Matrix]()
        for number in range(AT_ONCE):
            (part := Path(folder, str(number)).resolve()).mkdir()
            free.put(Matrix(part))

        def told(try_it: Callable[[Matrix, int, Any], Entry], number: int, what: Any) -> Entry:
            matrix = free.get()
            entry = try_it(matrix, number, what)
            free.put(matrix)
            why = f"{entry['settings']} {entry['why']}" if "why" in entry else ""
            print(f"{entry['outcome']:7} {entry['seconds']:6.1f} s  {number:3}  {why}", flush=True)
            return entry

        todo: list[tuple[Any, int, Any]] = [(Matrix.tried, number, cases[number]) for number in chosen]
        todo += [] if some else [(Matrix.refused, number, pair) for number, pair in enumerate(impossible)]
        entries = list(threads.map(lambda one: told(*one), todo))
    outcomes = Counter(entry["outcome"] for entry in entries)
    summary = {**outcomes, "pairs of values": len(pairs()), "seconds": round(time.monotonic() - start, 1)}
    print(", ".join(f"{name}: {value}" for name, value in summary.items()))
    save(options.json, {"summary": summary, "cases": entries})
    return int(outcomes["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
