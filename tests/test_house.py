"""The shape of the package: limits that last.

Where today's tree is above a limit, what is above it is listed by name. The lists may only become shorter: an entry
that is no longer needed fails the test too.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from unittest.mock import Mock

import pytest
from launching import make_task, ranks
from long_tests import few, listed
from paths import ROOT

from hybrid_grpo.config.composition import setting_names
from hybrid_grpo.config.features import feature_folders, registered
from hybrid_grpo.config.train import TrainConfig

PACKAGE = ROOT / "hybrid_grpo"
MOST_ENTRIES = 16
MOST_FILE = 400
MOST_FUNCTION = 60
MOST_LINES = 45398
MOST_CORE_LINES = 30262
MOST_TEST_LINES = 37435
MOST_BENCHMARK_LINES = 6778
MOST_WORDS_OF_DOCS = 47169
MOST_SETTINGS = 201
MOST_SPLATS = 14
MOST_TRACED_FILES = 53
MOST_TRACED_LINES = 10450
BESIDE_THE_CORE = (
    *("features/", "commands/", "watch/", "turns/"),
    *("data/tasks/", "rewards/code/", "rewards/maths/", "rewards/models/", "rewards/remote/", "rewards/tasks/"),
    *("records/charts/", "records/publishing/", "records/trackers/"),
)
"""Rooms that a run with plain functions as rewards does not enter; everything else is the core, which trains GRPO."""
LONG_FILES: set[str] = set()
LONG_FUNCTIONS = {"model/kernels/gpu/attention.py:_attend"}
FEATURES = re.compile("teacher|guest|curriculum", re.IGNORECASE)
REGISTRATION = "config/features.py"
KINDS_OF_SIDECARS = re.compile("picture|image|sight|expert|rout(ing|es)|support|SamplingMask", re.IGNORECASE)


@cache
def sources() -> dict[str, str]:
    """The Python files of the package, by their path in it."""
    return {str(file.relative_to(PACKAGE)): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}


def test_the_top_has_few_entries():
    entries = [p.name for p in PACKAGE.iterdir() if not p.name.startswith("__")]
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


def core() -> dict[str, str]:
    return {name: text for name, text in sources().items() if not name.startswith(BESIDE_THE_CORE)}


def texts(*patterns: str) -> dict[str, str]:
    return {str(file): file.read_text(encoding="utf-8") for pattern in patterns for file in ROOT.glob(pattern)}


def lines(files: dict[str, str]) -> int:
    return sum(text.count("\n") for text in files.values())


def test_nothing_grows():
    """These limits only fall: who needs lines takes them from elsewhere."""
    assert lines(sources()) <= MOST_LINES
    assert lines(core()) <= MOST_CORE_LINES
    assert lines(texts("tests/**/*.py")) <= MOST_TEST_LINES
    assert lines(texts("benchmarks/*.py", "benchmarks/*.sh")) <= MOST_BENCHMARK_LINES
    assert sum(len(text.split()) for text in texts("docs/**/*.md").values()) <= MOST_WORDS_OF_DOCS
    assert len(setting_names(TrainConfig)) <= MOST_SETTINGS


def limits(text: str) -> dict[str, int]:
    return {name: int(n) for name, n in re.findall(r"^(MOST_\w+) = (\d+)$", text, re.M)}


def test_limits_only_fall():
    """No limit is above what an earlier commit had, as far as their history is here."""
    file = "tests/test_house.py"
    assert len(now := limits((ROOT / file).read_text(encoding="utf-8"))) == 12
    if not (ROOT / ".git").exists():
        pytest.skip("a copy of the tree has no history")

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", "-C", str(ROOT), "--no-pager", *arguments], text=True)

    commits = git("log", "-n50", "--format=%h", "--", file).split()
    assert commits
    for commit in commits:
        before = limits(git("show", f"{commit}:{file}"))
        assert not {name: n for name, n in now.items() if n > before.get(name, n)}, f"raised since {commit}"


@pytest.mark.ranks
def test_a_step_can_be_read_in_an_afternoon(tmp_path):
    """CONTRIBUTING.md lists the files that a step with the default settings enters, but those of features."""
    [entered] = ranks(1, "traced", make_task(tmp_path))
    way = [name for name in entered if not name.startswith("features/")]
    print(f"{len(way)} files:", *way, sep="\n")
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Reading one step")[2]
    listed = re.findall(r"^- `([\w/]+\.py)`: .", section.partition("\n## ")[0], re.M)
    if "generation/cpu_step.py" not in way:
        pytest.skip("without the kernels for a CPU, decoding enters other files")
    assert sorted(listed) == way
    assert len(way) <= MOST_TRACED_FILES and lines({name: sources()[name] for name in way}) <= MOST_TRACED_LINES


def test_files_fit_in_a_head():
    assert {name for name, text in sources().items() if text.count("\n") > MOST_FILE} == LONG_FILES


def test_functions_fit_on_a_screen():
    functions = (
        (name, node)
        for name, text in sources().items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    long = {f"{name}:{f.name}" for name, f in functions if (f.end_lineno or 0) - f.lineno + 1 > MOST_FUNCTION}
    assert long == LONG_FUNCTIONS


def splats(tree: ast.AST) -> set[tuple[int, int]]:
    """Places of arguments `*x` or `**x` of calls where x is a tuple that is written there, or a tuple or dict that the
    same function has made, or a dict to which it has added."""
    found = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        nodes = list(ast.walk(function))
        made = {(ast.unparse(n.targets[0]), type(n.value)) for n in nodes if isinstance(n, ast.Assign)}
        made |= {(ast.unparse(n.target), type(n.value)) for n in nodes if isinstance(n, ast.AnnAssign | ast.AugAssign)}
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            values = [(argument.value, ast.Tuple) for argument in call.args if isinstance(argument, ast.Starred)]
            values += [(keyword.value, ast.Dict) for keyword in call.keywords if keyword.arg is None]
            written = [v for v, kind in values if isinstance(v, ast.Tuple) or (ast.unparse(v), kind) in made]
            found |= {(v.lineno, v.col_offset) for v in written}
    return found


def test_arguments_are_named():
    """The limit only falls: what is splatted now is for other libraries and for functions of users, or is to go. The
    launch of a kernel takes its addresses, strides and sizes in lines of their own."""
    program = "def f(a, **c):\n    b = 1, 2\n    c |= {'d': 3}\n    f(*(a, 1))\n    f(*b)\n    f(**c)\n    f(*a)"
    assert len(splats(ast.parse(program))) == 3
    files = [text for name, text in sources().items() if not name.startswith("model/kernels/")]
    assert sum(len(splats(ast.parse(text))) for text in files) <= MOST_SPLATS


def changed(tree: ast.AST) -> Iterator[str]:
    """Attributes that a file assigns, or whose lists it changes."""
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Attribute)):
        if isinstance(node.ctx, ast.Store):
            yield ast.unparse(node)
        elif node.attr in ("append", "extend", "insert", "clear") and isinstance(node.value, ast.Attribute):
            yield ast.unparse(node.value)


def test_the_core_names_no_feature():
    naming = {name for name, text in core().items() if FEATURES.search(text) and name != REGISTRATION}
    assert not naming


@pytest.mark.parametrize("file", ["generation/loop.py", "generation/scheduler.py", "data/packing.py"])
def test_what_decodes_and_packs_tokens_knows_no_kind_of_sidecar(file):
    """What travels beside tokens is a tuple to it, which model/sidecars.py describes."""
    assert KINDS_OF_SIDECARS.findall(sources()[file]) == []


def test_objects_are_complete_once_they_are_made():
    """Excepted are the memory that ranks share, objects of libraries, a conversation that its user goes on with, and
    what an evaluation has gathered."""
    excepted = (
        r"run/stopping/\w+\.py: ((self\.(_shared\.)?)?mine|entries\[rank\]|RankStatus)\.\w+",
        r"(commands/arguments\.py: error\.args|features/teacher/divergence\.py: ctx\.\w+)",
        r"records/trackers/follower\.py: (timer\.daemon|tempfile\.tempdir)",
        r"commands/(chat\.py: (self\._history|history|talk)\.(system|turns|pictures)|eval\.py: measured\.lines)",
        r".*: (self|cls)\.\w+",
    )
    rooms = ("trainer", "policy", "run/", "commands/", "features/", "records/")
    trees = {name: ast.parse(text) for name, text in sources().items() if name.startswith(rooms)}
    found = {f"{name}: {attribute}" for name, tree in trees.items() for attribute in changed(tree)}
    assert not {place for place in found if not re.fullmatch("|".join(excepted), place)}
    assert all(any(re.fullmatch(pattern, place) for place in found) for pattern in excepted), "not needed any more"
    assert [*changed(ast.parse("a.b.append(1); a.c = 1; a.append(1)"))] == ["a.c", "a.b"]


def test_features_are_folders_with_settings_and_tests():
    for folder in feature_folders():
        assert (folder / "settings.py").exists()
        assert list((ROOT / "tests/features" / folder.name).glob("test_*.py")), folder.name
        page = registered()[folder.name].page
        assert not page or (ROOT / page).is_file(), page


def test_contributing_names_files_that_exist():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## How the code should be")[0]
    names = [name for row in re.findall(r"^\|.*$", table, re.M) for name in re.findall(r"`([\w./]+/[\w./]*)`", row)]
    assert len(names) > 10
    absent = [name for name in names if not ((PACKAGE / name).exists() or (ROOT / name).exists())]
    assert not absent


def test_the_longest_tests_are_there():
    """A name that is gone would leave its test in every run; see tests/support/long_tests.py."""
    cases = [Mock(callspec=Mock(indices={"a": a, "b": b})) for a in range(2) for b in range(3)]
    assert few(cases, 12.0) == [cases[0], cases[4], cases[2]], "2 s each, and 6 s have room for three"
    assert (few(cases, 6 * 45.0), few(cases, 6 * 45.1)) == ([cases[0]], [])
    for place, name in (long.split("::") for long in listed()):
        # A feature that is removed takes its tests with it.
        if (ROOT / place).parent.exists() or not place.startswith("tests/features/"):
            assert f"def {name}(" in (ROOT / place).read_text(encoding="utf-8"), f"{place}::{name}"
