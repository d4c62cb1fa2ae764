import numpy as np
import pytest

from hybrid_grpo.records.charts.thinning import clip, present, smooth, thin


@pytest.mark.parametrize("length", [1, 2, 19, 20, 21, 399, 10_007])
def test_a_thinned_curve_has_the_ends_and_the_extremes_of_the_whole(length):
    x = np.arange(length, dtype=float)
    y = np.random.default_rng(length).standard_normal(length)
    points = 20
    thin_x, thin_y = thin((x, y), points)
    assert len(thin_x) <= max(3 * points, 5)
    assert (np.diff(thin_x) > 0).all()
    np.testing.assert_array_equal(thin_y, y[thin_x.astype(int)])
    assert (thin_x[0], thin_x[-1]) == (0, length - 1)
    assert (thin_y.min(), thin_y.max()) == (y.min(), y.max())
    # So has every part of it that is as wide as a bucket: no spike is lost.
    size = max(1, length // (points // 2))
    for start in range(0, length - size, size):
        part = (thin_x >= start) & (thin_x < start + size)
        assert thin_y[part].max() == y[start : start + size].max()


def test_a_range_keeps_a_neighbour_on_either_side():
    curve = (np.array([0.0, 10, 20, 30, 40]), np.arange(5.0))
    assert clip(curve, 15, 30)[0].tolist() == [10, 20, 30, 40]
    assert clip(curve, 21, 22)[0].tolist() == [20, 30]
    assert clip(curve, -5, 100)[0].tolist() == [0, 10, 20, 30, 40]
    assert clip(curve, 50, 60)[0].tolist() == [40]


def test_points_without_a_value_are_left_out():
    x, y = present(np.array([0.0, 1, 2, np.nan]), np.array([1.0, np.nan, 3, 4]))
    assert (x.tolist(), y.tolist()) == ([0, 2], [1, 3])


@pytest.mark.parametrize("window", [1, 2, 5, 9, 1000])
def test_smoothing_is_the_mean_of_the_neighbors(window):
    """Also of values whose differences are small beside them, which a sum of all would lose."""
    y = 1e12 + np.random.default_rng(0).random(50)
    reach = min(window // 2, 24)
    expected = []
    for at in range(50):
        side = min(reach, at, 49 - at)
        expected.append(1e12 + np.mean(y[at - side : at + side + 1] - 1e12))
    np.testing.assert_allclose(smooth(y, window) - 1e12, np.array(expected) - 1e12, rtol=0, atol=3e-4)


def test_a_straight_line_stays_straight():
    line = np.linspace(3, 7, 41)
    np.testing.assert_allclose(smooth(line, 10), line, rtol=1e-12)
