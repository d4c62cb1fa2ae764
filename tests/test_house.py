"""The shape of the package: limits that last.

Where today's tree is above a limit, what is above it is listed by name. The lists may only become shorter: an entry
that is no longer needed fails the test too.
"""

import ast
import re
import subprocess
from functools import cache

from long_tests import listed
from paths import ROOT

from hybrid_grpo.config.composition import setting_names
from hybrid_grpo.config.features import feature_folders, registered
from hybrid_grpo.config.train import TrainConfig

PACKAGE = ROOT / "hybrid_grpo"
MOST_ENTRIES = 16
MOST_FILE = 400
MOST_FUNCTION = 60
MOST_LINES = 51866
MOST_CORE_LINES = 33383
MOST_TEST_LINES = 43061
MOST_BENCHMARK_LINES = 7000
MOST_WORDS_OF_DOCS = 54400
MOST_SETTINGS = 220
MOST_SPLATS = 34
MOST_FILES_OF_A_STEP = 22
MOST_LINES_OF_A_STEP = 6080
BESIDE_THE_CORE = (
    *("features/", "commands/", "watch/", "turns/"),
    *("rewards/code/", "rewards/maths/", "rewards/models/", "rewards/remote/"),
    *("records/publishing/", "records/trackers/"),
)
"""Rooms that a run with plain functions as rewards does not enter; everything else is the core, which trains GRPO."""
LONG_FILES: set[str] = set()
LONG_FUNCTIONS = {"model/kernels/gpu/attention.py:_attend", "model/kernels/gpu/sampling.py:_sample"}
FEATURES = re.compile("critic|teacher|guest|curriculum", re.IGNORECASE)
REGISTRATION = "config/features.py"


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
    git = ["git", "-C", str(ROOT), "--no-pager"]
    commits = subprocess.run([*git, "log", "-n50", "--format=%h", "--", file], capture_output=True, text=True).stdout
    assert len(now := limits((ROOT / file).read_text(encoding="utf-8"))) == 12
    for commit in commits.split():
        before = limits(subprocess.run([*git, "show", f"{commit}:{file}"], capture_output=True, text=True).stdout)
        assert not {name: n for name, n in now.items() if n > before.get(name, n)}, f"raised since {commit}"


def test_a_step_can_be_read_in_an_afternoon():
    """The files that CONTRIBUTING.md lists in reading order, from prompts to weights, are few and exist."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Reading one step")[2]
    way: list[str] = []
    for item in re.findall(r"^\d+\. (.*?):", section.partition("\n## ")[0], re.M | re.S):
        folder = ""
        for name in re.findall(r"`([\w/]+\.py)`", item):
            folder = name.rpartition("/")[0] if "/" in name else folder
            way.append(name if "/" in name or not folder else f"{folder}/{name}")
    assert len(way) > 10 and len(set(way)) == len(way) <= MOST_FILES_OF_A_STEP
    absent = [name for name in way if name not in sources()]
    assert not absent, f"CONTRIBUTING.md lists them, and they are not there: {absent}"
    assert lines({name: sources()[name] for name in way}) <= MOST_LINES_OF_A_STEP


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
    """Places of arguments `*x` or `**x` of calls where x is a tuple or dict that the same function has made."""
    found = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        nodes = list(ast.walk(function))
        made = {(ast.unparse(n.targets[0]), type(n.value)) for n in nodes if isinstance(n, ast.Assign)}
        made |= {(ast.unparse(n.target), type(n.value)) for n in nodes if isinstance(n, ast.AnnAssign)}
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            values = [(argument.value, ast.Tuple) for argument in call.args if isinstance(argument, ast.Starred)]
            values += [(keyword.value, ast.Dict) for keyword in call.keywords if keyword.arg is None]
            found |= {(v.lineno, v.col_offset) for v, kind in values if (ast.unparse(v), kind) in made}
    return found


def test_arguments_are_named():
    """The limit only falls: what is splatted now is for other libraries and for functions of users, or is to go."""
    assert sum(len(splats(ast.parse(text))) for text in sources().values()) <= MOST_SPLATS


def test_the_core_names_no_feature():
    naming = {name for name, text in core().items() if FEATURES.search(text) and name != REGISTRATION}
    assert not naming


def test_objects_are_complete_once_they_are_made():
    """Excepted are the memory that ranks share, objects of libraries, a feature's copy of itself, and a setter."""
    excepted = r"(.*\bmine|entries\[rank\]|RankStatus|ctx|error|timer|tempfile|other|history|talk)\.\w+"
    assigned = {
        f"{name}: {ast.unparse(node)}"
        for name, text in sources().items()
        for node in ast.walk(ast.parse(text))
        if name.startswith(("trainer", "policy", "run/", "commands/", "features/", "records/"))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if not re.fullmatch(rf"(self|cls)\.\w+|{excepted}", ast.unparse(node))
    }
    assert not assigned


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
    for place, name in (long.split("::") for long in listed()):
        # A feature that is removed takes its tests with it.
        if (ROOT / place).parent.exists() or not place.startswith("tests/features/"):
            assert f"def {name}(" in (ROOT / place).read_text(encoding="utf-8"), f"{place}::{name}"
