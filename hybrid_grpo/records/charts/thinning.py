"""Prepares curves for a screen: thins them to as many points as it can show, keeping extremes, and smooths them."""

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
Points = tuple[Column, Column]
"""Ascending positions on the axis, and the values at these positions; both have the shape [points]."""


def present(x: Column, y: Column) -> Points:
    """Leave out the points whose position or value is NaN."""
    kept = ~(np.isnan(x) | np.isnan(y))
    return x[kept], y[kept]


def clip(curve: Points, low: float, high: float) -> Points:
    """Return the points with positions in [low, high], and one more on either side, so that lines reach the edges."""
    x, y = curve
    start = max(0, int(np.searchsorted(x, low, "left")) - 1)
    end = int(np.searchsorted(x, high, "right")) + 1
    return x[start:end], y[start:end]


def thin(curve: Points, points: int) -> Points:
    """Thin a curve to about `points` points: neighbors share a bucket, whose lowest and highest points are kept.

    The first and the last point are kept too, so that the curve keeps its ends.
    """
    x, y = curve
    buckets = max(1, points // 2)
    size = len(y) // buckets
    if size <= 2:
        return curve
    whole = buckets * size
    grid = y[:whole].reshape(buckets, size)
    starts = np.arange(0, whole, size)
    rest = np.arange(whole, len(y))
    extremes = [whole + int(np.argmin(y[whole:])), whole + int(np.argmax(y[whole:]))] if rest.size else []
    kept = np.unique(
        np.concatenate([starts + grid.argmin(1), starts + grid.argmax(1), np.array([0, *extremes, len(y) - 1])])
    )
    return x[kept], y[kept]


def smooth(y: Column, window: int) -> Column:
    """Return a moving average over up to `window` neighbors, the same number on either side of each value."""
    reach = min(window // 2, (len(y) - 1) // 2)
    if reach < 1:
        return y
    at = np.arange(len(y))
    side = np.minimum(reach, np.minimum(at, at[::-1]))
    # Sums of differences to one value: sums of large values would lose the digits in which they differ.
    sums = np.concatenate([[0.0], np.cumsum(y - y[0])])
    average: Column = y[0] + (sums[at + side + 1] - sums[at - side]) / (2 * side + 1)
    return average
