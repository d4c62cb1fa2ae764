"""Settings of the pretraining loss that do not fit."""

import pytest
from user import User


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ptx.path=x.jsonl"], "ptx.path is set, but without ptx.coef there is no such loss: set ptx.coef"),
        (["--ptx.coef=1"], "ptx.coef 1 needs texts: set ptx.path, or ptx.coef to 0"),
        (["--ptx.coef=1", "--ptx.path=nope/x.jsonl"], "ptx.path nope/x.jsonl: there is no such file or folder"),
        (["--ptx.coef=1", "--ptx.path=x/y", "--ptx.max_tokens=1"], "ptx.max_tokens 1 leaves no token to predict"),
        (
            ["--ptx.coef=1", "--ptx.path=hub/name", "--ptx.batch_size=5"],
            "batch_size 5 does not divide by ranks = 2",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(user: User, arguments: list[str], message: str) -> None:
    assert message in user.refused(*arguments, ranks=2)
