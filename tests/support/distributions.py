"""What tokens are drawn from, in float64, and whether they were."""

import math

import numpy as np


def probabilities(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The filtered softmax, token by token in float64."""
    x = np.array(logits_V.tolist(), dtype=np.float64) / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = list(order[: top_k or len(p)])
    total = sum(p[i] for i in kept)
    nucleus, mass = [], 0.0
    for i in kept:
        nucleus.append(i)
        mass += p[i]
        if mass >= top_p * total:
            break
    nucleus = [i for i in nucleus if p[i] >= min_p * p.max()]
    q = np.zeros_like(p)
    q[nucleus] = p[nucleus] / p[nucleus].sum()
    return q


def assert_follows(counts, p):
    """Chi-square of `counts` against probabilities, below a bound passed by chance once in 10^9 (Wilson-Hilferty)."""
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * counts.sum()
    assert expected.min() > 5, "too few draws for the test to mean anything"
    chi2, freedom = ((counts[p > 0] - expected) ** 2 / expected).sum(), len(expected) - 1
    if freedom:
        spread = 2 / (9 * freedom)
        assert chi2 < freedom * (1 - spread + 6 * math.sqrt(spread)) ** 3
