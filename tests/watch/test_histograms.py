import numpy as np
import pytest

from hybrid_grpo.watch import histograms
from hybrid_grpo.watch.histograms import BUCKETS, Histograms


def noted(low: float, high: float, counts: list[int]) -> dict[str, object]:
    return {"reward": {"edges": np.linspace(low, high, len(counts) + 1).tolist(), "counts": counts}}


def test_steps_with_other_edges_are_laid_on_common_ones() -> None:
    """A share of the values lies where it lay: half of them in the lower half, whatever the edges of the step."""
    found = Histograms()
    found.append(10, noted(0, 1, [4, 4]))
    found.append(20, noted(0, 2, [3, 1]))
    found.append(30, noted(1.5, 1.5, [8]))  # all values alike
    over = found.over_time(100)["reward"]
    assert over.steps == [10, 20, 30]
    assert over.shares.shape == (BUCKETS, 3)
    np.testing.assert_allclose(over.shares.sum(0), 1, atol=0.05)
    below = over.edges[1:] <= 1
    np.testing.assert_allclose(over.shares[below].sum(0), [1, 0.75, 0], atol=0.04)
    half = over.edges[1:] <= 0.5
    np.testing.assert_allclose(over.shares[half].sum(0), [0.5, 0.375, 0], atol=0.04)
    assert found.near(25) == (20, {"reward": {"edges": [0, 1, 2], "counts": [3, 1]}})
    assert found.near(9) is None


def test_of_many_steps_some_stay_from_the_first_to_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histograms, "MOST", 10)
    found = Histograms()
    for step in range(1000):
        found.append(step, noted(0, 1, [1, 2]))
    steps = found.over_time(5)["reward"].steps
    assert len(steps) == 5
    assert steps[0] == 0
    assert steps[-1] > 800
    assert len(found.over_time(100)["reward"].steps) <= 10


def test_what_is_no_histogram_is_passed_over() -> None:
    found = Histograms()
    bad = [
        None, {"reward": None}, {"reward": {"edges": [0, 1]}}, {"reward": {"edges": [0, 1], "counts": []}},
        {"reward": {"edges": [1, 0], "counts": [1]}}, {"reward": {"edges": [0, "x"], "counts": [1]}},
        {"reward": {"edges": [0, 1], "counts": [0]}}, {"reward": {"edges": [0, float("nan")], "counts": [1]}},
    ]  # fmt: skip
    for step, histogram in enumerate(bad):
        found.append(step, histogram)
    assert found.near(100) is None
    assert found.over_time(10) == {}


def test_names_and_counts_have_limits(monkeypatch):
    """32 new names at every step took seconds to show; large histograms filled hundreds of megabytes."""
    monkeypatch.setattr(histograms, "_MOST_COUNTS", 1000)
    kept = Histograms()
    for step in range(200):
        kept.append(step, {f"{step}/{k}": {"edges": list(range(21)), "counts": [1] * 20} for k in range(3)})
        kept.append(step, {"a": {"edges": list(range(21)), "counts": [1] * 20}})
    assert len(kept.over_time(10)) <= 32
    assert sum(len(counts) for found in kept._steps.values() for _, counts in found.values()) <= 1000
