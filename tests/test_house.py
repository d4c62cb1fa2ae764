"""The shape of the package: limits that last.

Where today's tree is above a limit, what is above it is listed by name. The lists may only become shorter: an entry
that is no longer needed fails the test too.
"""

import ast
import re
from functools import cache

from paths import ROOT

from hybrid_grpo.config.features import feature_folders, registered

PACKAGE = ROOT / "hybrid_grpo"
MOST_ENTRIES, MOST_LINES, MOST_FILE, MOST_FUNCTION = 16, 40_300, 400, 60
LONG_FILES = {
    "run/run.py",
}
LONG_FUNCTIONS = {
    "config/rollout.py:_check",
    "model/kernels/gpu/sampling.py:_sample",
    "run/resuming.py:find_start",
    "run/run.py:_advance",
    "run/saving/checkpoint.py:save",
}
FEATURES = re.compile("critic|teacher|guest|ptx|curriculum", re.IGNORECASE)
REGISTRATION = "config/features.py"
NAMING: set[str] = set()
"""Modules of the core that still name a feature."""


@cache
def sources() -> dict[str, str]:
    """The Python files of the package, by their path in it."""
    return {str(file.relative_to(PACKAGE)): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}


def test_the_top_has_few_entries():
    entries = [p.name for p in PACKAGE.iterdir() if not p.name.startswith("__")]
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


def test_the_package_does_not_grow_unnoticed():
    assert sum(text.count("\n") for text in sources().values()) <= MOST_LINES


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


def test_the_core_learns_the_name_of_no_further_feature():
    rest = ("features/", "watch/", "commands/", REGISTRATION)
    naming = {name for name, text in sources().items() if FEATURES.search(text) and not name.startswith(rest)}
    assert naming == NAMING


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
