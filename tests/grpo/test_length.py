"""The penalty for long completions."""

from hybrid_grpo.grpo.advantages import overlong_penalty


def test_overlong_penalty_is_equation_13_of_dapo() -> None:
    penalty = overlong_penalty([1, 16, 17, 18, 20, 21, 100], 20, 4, 0.5)
    assert penalty == [0.0, 0.0, -0.125, -0.25, -0.5, -0.5, -0.5]
    assert overlong_penalty([1, 20, 30], 20, 0, 1.0) == [0.0, 0.0, 0.0]
