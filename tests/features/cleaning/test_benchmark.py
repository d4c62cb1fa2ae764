"""The bars of benchmarks/cleaning.py, on fewer rows."""

import sys

import pytest
from paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import cleaning


@pytest.mark.parametrize("kind", cleaning.KINDS)
def test_planted_near_duplicates_are_found(kind):
    """At least 98 % of the planted rows, and at most 0.5 % of the others."""
    result = cleaning.measure(kind, rows=2000, planted=200, seed=3)
    assert result["found_share"] >= 0.98 and result["false_share"] <= 0.005
