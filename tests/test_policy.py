import pytest

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.policy import learning_rate


def rates(schedule, total=10, warmup=4):
    config = PolicyConfig(lr=1.0, lr_schedule=schedule, warmup_steps=warmup)
    return [learning_rate(config, step, total) for step in range(total)]


def test_warm_up_is_linear_and_its_last_step_has_the_full_rate():
    for schedule in ("constant", "linear", "cosine"):
        assert rates(schedule)[:4] == [0.25, 0.5, 0.75, 1.0]
        assert rates(schedule)[4] == 1.0


def test_the_shapes_after_warm_up():
    assert rates("constant")[4:] == [1.0] * 6
    assert rates("linear")[4:] == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert rates("cosine")[4:] == pytest.approx([1, 0.933013, 0.75, 0.5, 0.25, 0.066987], abs=1e-6)


def test_without_warm_up_and_past_the_end():
    assert rates("constant", total=3, warmup=0) == [1.0, 1.0, 1.0]
    assert learning_rate(PolicyConfig(lr=2.0, warmup_steps=8), 3, total=4) == 1.0
