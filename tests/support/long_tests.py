"""The tests that take longest, of which a run draws a twelfth (long.txt).

    bash tests/run.sh --all --junitxml /tmp/junit.xml; python tests/support/long_tests.py /tmp/junit.xml

writes long.txt anew: the functions whose cases together took 10 s or more, beside other workers, with these seconds.
Shorter ones that wait for what a long one of their file has made are added by hand, and stay: in a run without the long
one they would have to make it.
"""

import hashlib
import re
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parent.parent
LIST = TESTS / "long.txt"
PARTS, LEAST_SECONDS = 12, 10
ALWAYS = (
    "tests/grpo/test_loss_ranks.py::test_a_step_does_not_depend_on_the_ranks",
    "tests/run/test_start.py::test_an_interrupted_run_ends_as_the_uninterrupted_one_to_the_bit",
    "tests/commands/test_commands.py::test_a_run_leaves_its_folder",
)
"""Long ones that no run leaves out: one step, one run to the bit, and what a run leaves."""


def parts() -> list[list[str]]:
    """The functions of long.txt in parts of about equal time. Those of a file, which may share what one has made, are
    in the same part."""
    of_file: defaultdict[str, list[str]] = defaultdict(list)
    taken: defaultdict[str, int] = defaultdict(int)
    for seconds, name in _listed():
        of_file[file_of(name)].append(name)
        taken[file_of(name)] += seconds
    found: list[list[str]] = [[] for _ in range(PARTS)]
    total = [0] * PARTS
    for file in sorted(of_file, key=lambda file: -taken[file]):
        least = total.index(min(total))
        found[least] += of_file[file]
        total[least] += taken[file]
    return found


def file_of(name: str) -> str:
    return name.partition("::")[0]


def _listed() -> list[tuple[int, str]]:
    lines = map(str.split, LIST.read_text(encoding="utf-8").splitlines())
    return [(int(seconds), name) for seconds, name in lines]


def drawn() -> int:
    """The number of the part that is run, which follows from the sources: another change, another part."""
    digest = hashlib.blake2b()
    for path in sorted(TESTS.parent.glob("hybrid_grpo/**/*.py")):
        digest.update(path.read_bytes())
    return int(digest.hexdigest(), 16) % PARTS


def write(report: Path) -> None:
    """Write long.txt from a report of pytest, longest first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        place = case.get("classname", "").replace(".", "/") + ".py::" + re.sub(r"\[.*", "", case.get("name", ""))
        seconds[place] += float(case.get("time", 0))
    long = {name for name, s in seconds.items() if s >= LEAST_SECONDS}
    long |= {name for _, name in _listed() if name in seconds and file_of(name) in map(file_of, long)}
    rows = [(round(seconds[name]), name) for name in long.difference(ALWAYS)]
    LIST.write_text("".join(f"{s} {name}\n" for s, name in sorted(rows, reverse=True)), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
