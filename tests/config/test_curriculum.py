"""Settings of the curriculum that are refused."""

import pytest
from user import User


@pytest.mark.parametrize(("settings", "says"), [
    (["skip_above=1.2"], "curriculum.skip_above 1.2 must be in [0, 1]"),
    (["skip_above=0.1", "skip_below=0.2"], "curriculum.skip_below 0.2 and curriculum.skip_above 0.1 leave out"),
    (["sampling=difficulty", "floor=0"], "curriculum.floor 0 must be in (0, 1]"),
    (["sampling=difficulty", "half_life=0"], "curriculum.half_life 0 must be 1 or greater"),
    (["sampling=difficulty", "min_tries=3"], "curriculum.min_tries 3 has no effect without curriculum.skip_above"),
    (["column=level"], "curriculum.column level has no effect with curriculum.sampling uniform"),
    (["floor=0.2"], "curriculum.floor 0.2 has no effect with curriculum.sampling uniform"),
])  # fmt: skip
def test_settings_that_mean_nothing_are_refused(tmp_path, settings, says):
    assert User(tmp_path).refused(*(f"--curriculum.{setting}" for setting in settings)).startswith(says)


def test_the_order_of_the_source_and_a_curriculum_do_not_go_together(tmp_path):
    user = User(tmp_path)
    user.train("--curriculum.sampling=difficulty", "--curriculum.column=level")
    message = user.refused("--curriculum.skip_above=0.9", "--data.shuffle=false")
    assert message.startswith("data.shuffle false keeps the order of the source, which curriculum changes")
