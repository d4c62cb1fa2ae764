"""Settings of the curriculum that are refused."""

import pytest
from user import User


@pytest.mark.parametrize(("settings", "says"), [
    (["skip_above=1.2"], "curriculum.skip_above 1.2 must be in [0, 1]"),
    (["skip_above=0.1", "skip_below=0.2"], "curriculum.skip_below 0.2 and curriculum.skip_above 0.1 leave out"),
    (["column=level"], "there is no setting curriculum.column"),
])  # fmt: skip
def test_settings_that_mean_nothing_are_refused(tmp_path, settings, says):
    assert User(tmp_path).refused(*(f"--curriculum.{setting}" for setting in settings)).startswith(says)


def test_the_order_of_the_source_and_a_curriculum_do_not_go_together(tmp_path):
    user = User(tmp_path)
    user.train("--curriculum.sampling=difficulty")
    message = user.refused("--curriculum.skip_above=0.9", "--data.shuffle=false")
    assert message.startswith("data.shuffle false keeps the order of the source, which curriculum changes")
