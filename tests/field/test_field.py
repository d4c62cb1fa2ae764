"""Every case of this folder; benchmarks/field.py describes their format."""

import sys

import pytest
from paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import field

CASES = {name: field.load(name) for name in field.names()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.process] * case.get("process", False)) for name, case in CASES.items()],
)
def test_what_strangers_bring_is_read_right_or_refused_in_one_line(name):
    assert not field.wrong(CASES[name], field.CASES / name)
