"""The tests that take longest, of which a run draws a twelfth (long.txt).

    bash tests/run.sh --all --junitxml /tmp/junit.xml; python tests/support/long_tests.py /tmp/junit.xml

writes long.txt anew: the functions whose cases together took 10 s or more, beside other workers, with these seconds.
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
    """The functions of long.txt in parts of about equal time."""
    found: list[list[str]] = [[] for _ in range(PARTS)]
    seconds = [0] * PARTS
    for line in LIST.read_text(encoding="utf-8").splitlines():
        taken, name = line.split()
        least = seconds.index(min(seconds))
        found[least].append(name)
        seconds[least] += int(taken)
    return found


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
    rows = [(round(s), name) for name, s in seconds.items() if s >= LEAST_SECONDS and name not in ALWAYS]
    LIST.write_text("".join(f"{s} {name}\n" for s, name in sorted(rows, reverse=True)), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
