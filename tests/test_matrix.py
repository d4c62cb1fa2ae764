"""Two of the cases of benchmarks/matrix.py, and that together all cases have every pair."""

import sys
from itertools import combinations

import pytest
from paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import matrix
from matrix_cases import pairs, refused_pairs

CASES, REFUSED = (29, 0), (0, 17)
"""The numbers of those that are tried here. A case is four runs, and the benchmark, which has all of them, takes a
quarter of an hour."""
IMPOSSIBLE = refused_pairs()


@pytest.fixture(scope="module")
def cases():
    return matrix.covering()


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    return matrix.Matrix(tmp_path_factory.mktemp("matrix").resolve())


def test_the_cases_have_every_pair_that_can_be_combined_and_no_other(cases):
    found = {frozenset(pair) for case in cases for pair in combinations(case.items(), 2)}
    assert found == {pair for pair, possible in pairs().items() if possible}
    assert len(cases) < 65


@pytest.mark.ranks
@pytest.mark.parametrize("number", CASES)
def test_a_case_ends_agrees_with_other_ranks_and_resumes_to_the_bit(tried, cases, number):
    entry = tried.tried(number, cases[number])
    assert entry["outcome"] == "passed", f"python benchmarks/matrix.py --cases {number}: {entry}"


@pytest.mark.ranks
@pytest.mark.parametrize("number", REFUSED)
def test_a_pair_that_cannot_be_combined_is_refused_in_one_line(tried, number):
    entry = tried.refused(number, IMPOSSIBLE[number])
    assert entry["outcome"] == "refused", entry
