"""Curves for a screen: thinned to as many points as it can show, with extremes kept, and smoothed."""

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
Points = tuple[Column, Column]
"""Positions on the axis, ascending, and the values there; both [points]."""


def present(x: Column, y: Column) -> Points:
    """The points that have both a position and a value."""
    kept = ~(np.isnan(x) | np.isnan(y))
    return x[kept], y[kept]


def clip(curve: Points, low: float, high: float) -> Points:
    """The points in [low, high], and one more on either side, so that lines reach the edges."""
    x, y = curve
    start = max(0, int(np.searchsorted(x, low, "left")) - 1)
    end = int(np.searchsorted(x, high, "right")) + 1
    return x[start:end], y[start:end]


def thin(curve: Points, points: int) -> Points:
    """At most about `points` points: neighbours share a bucket, and of each bucket the lowest and the highest stay.

    The first and the last point stay too, so that the curve keeps its ends.
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
    """A moving average over up to `window` neighbours, the same number on either side of each value."""
    reach = min(window // 2, (len(y) - 1) // 2)
    if reach < 1:
        return y
    at = np.arange(len(y))
    side = np.minimum(reach, np.minimum(at, at[::-1]))
    # Sums of differences to one value: sums of large values would lose the digits in which they differ.
    sums = np.concatenate([[0.0], np.cumsum(y - y[0])])
    average: Column = y[0] + (sums[at + side + 1] - sums[at - side]) / (2 * side + 1)
    return average
