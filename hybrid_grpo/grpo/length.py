"""The length penalty: DAPO's soft overlong punishment (arXiv:2503.14476, equation 13)."""

from collections.abc import Sequence


def overlong_penalty(lengths: Sequence[int], max_completion_tokens: int, buffer: int, factor: float) -> list[float]:
    """Return what to add to each completion's reward for its length in tokens: 0 up to `max_completion_tokens - buffer`
    tokens, falling linearly to `-factor` at `max_completion_tokens`. With `buffer` 0 it is 0 for all completions."""
    return [factor * linear_penalty(length - max_completion_tokens + buffer, buffer) for length in lengths]


def linear_penalty(excess: int, span: int) -> float:
    """Return 0 up to an `excess` of 0, falling linearly to -1 at `span`, and -1 beyond; always 0 if `span` is 0."""
    return min(0.0, max(-1.0, -excess / span)) if span else 0.0
