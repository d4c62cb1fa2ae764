"""Settings of the pretraining loss that do not fit."""

import pytest
from user import User

from hybrid_grpo.config import EvaluateConfig
from hybrid_grpo.config.checks import check_eval
from hybrid_grpo.config.parsing import parse


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ptx.path=x.jsonl"], "ptx.path x.jsonl has no effect without ptx.coef: set ptx.coef, or take ptx.path out"),
        (["--ptx.coef=1"], "ptx.coef 1 needs texts: set ptx.path, or ptx.coef to 0"),
        (["--ptx.coef=1", "--ptx.path=nope/x.jsonl"], "ptx.path nope/x.jsonl: there is no such file or folder"),
        (["--ptx.coef=1", "--ptx.path=x/y", "--ptx.max_tokens=1"], "ptx.max_tokens 1 leaves no token to predict"),
        (
            ["--ptx.coef=1", "--ptx.path=hub/name", "--ptx.rows_per_step=5"],
            "rows_per_step 5 does not divide by ranks = 2",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(user: User, arguments: list[str], message: str) -> None:
    assert message in user.refused(*arguments, ranks=2)


def test_an_evaluation_does_not_read_the_texts(user: User) -> None:
    held_out = ["--data.eval_path", f"{user.folder / 'train.jsonl'}", "--rewards=exact_match"]
    recipe = user.yaml("ptx: {coef: 1, path: nope/x.jsonl}")
    check_eval(parse(EvaluateConfig, [*user.sound, *held_out, "--config", recipe], "eval").config)
