"""The tests that take longest, of whose cases a run takes a few, always the same (long.txt).

    bash tests/run.sh --all --junitxml /tmp/junit.xml; python tests/support/long_tests.py /tmp/junit.xml

writes long.txt anew: the functions whose cases together took 10 s or more, beside other workers, with these seconds.
Shorter ones that wait for what a long one of their file has made are added by hand, and stay: in a run without the long
one they would have to make it.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

TESTS = Path(__file__).parent.parent
LIST = TESTS / "long.txt"
LEAST_SECONDS = 10
SECONDS = 6.0
"""A run takes as many cases of a function as take this long together, and at least one."""
LONGEST = 45.0
"""Of a function whose cases take longer than this on average, a run takes none."""


def listed() -> dict[str, int]:
    """The seconds of each function of long.txt."""
    lines = map(str.split, LIST.read_text(encoding="utf-8").splitlines())
    return {name: int(seconds) for seconds, name in lines}


def few(cases: Sequence[Any], seconds: float) -> list[Any]:
    """Return those of a function's cases that a run takes. All together take `seconds`, of which each counts its equal
    share. Each one taken has the most values of parameters that none before it has, and is the first of equals."""
    kept: list[Any] = []
    seen: set[tuple[str, int]] = set()
    rest = {case: set(case.callspec.indices.items()) if hasattr(case, "callspec") else set() for case in cases}
    while rest and seconds <= LONGEST * len(cases) and (not kept or (len(kept) + 1) * seconds / len(cases) <= SECONDS):
        case = max(rest, key=lambda case: len(rest[case] - seen))
        seen |= rest.pop(case)
        kept.append(case)
    return kept


def write(report: Path) -> None:
    """Write long.txt from a report of pytest, longest first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        place = case.get("classname", "").replace(".", "/") + ".py::" + re.sub(r"\[.*", "", case.get("name", ""))
        seconds[place] += float(case.get("time", 0))
    long = {name for name, s in seconds.items() if s >= LEAST_SECONDS}
    files = {name.partition("::")[0] for name in long}
    long |= {name for name in listed() if name in seconds and name.partition("::")[0] in files}
    rows = sorted(((round(seconds[name]), name) for name in long), reverse=True)
    LIST.write_text("".join(f"{s} {name}\n" for s, name in rows), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
