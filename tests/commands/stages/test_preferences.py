import json

import pytest
from char_tokenizer import TEMPLATE, char_tokenizer, ids

from hybrid_grpo.commands.stages.preferences import read_preferences
from hybrid_grpo.config import DataConfig, RewardLoopConfig
from hybrid_grpo.config.errors import UserError

USER, ASSISTANT, SYSTEM = (
    lambda text, role=role: {"role": role, "content": text} for role in ("user", "assistant", "system")
)


def read(tmp_path, *rows, adds_bos=False, template=TEMPLATE, reward=None, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=str(path), **settings)
    return read_preferences(config, RewardLoopConfig(**(reward or {})), char_tokenizer(template, adds_bos=adds_bos))


CHAT = ids("<bos>", "<user>", "a", "<assistant>", "x")


@pytest.mark.parametrize(
    ("row", "settings", "chosen"),
    [
        ({"chosen": "ax"}, {}, ids("<bos>", "ax")),
        ({"prompt": "a", "chosen": "x"}, {}, ids("<bos>", "ax")),
        ({"prompt": "a", "chosen": "x"}, {"chat_template": "always"}, CHAT),
        ({"prompt": [USER("a")], "chosen": [ASSISTANT("x")]}, {}, CHAT),
        ({"prompt": [USER("a")], "chosen": "x"}, {}, CHAT),
        ({"chosen": [USER("a"), ASSISTANT("x")]}, {}, CHAT),
        ({"prompt": "not read", "chosen": [USER("a"), ASSISTANT("x")]}, {}, CHAT),
        (
            {"prompt": [USER("a")], "chosen": [ASSISTANT("b"), USER("c"), ASSISTANT("x")]},
            {},
            ids("<bos>", "<user>", "a", "<assistant>", "b", "<user>", "c", "<assistant>", "x"),
        ),
        (
            {"chosen": [USER("a"), ASSISTANT("x")]},
            {"system_prompt": "s"},
            ids("<bos>", "<system>", "s", "<user>", "a", "<assistant>", "x"),
        ),
    ],
)
def test_the_formats_of_trl_become_the_texts_that_a_reward_model_is_asked_about(tmp_path, row, settings, chosen):
    """No end-of-sequence token is added: a text is what `rewards` will see, and what the template writes."""
    rejected = [*row["chosen"][:-1], ASSISTANT("y")] if isinstance(row["chosen"], list) else row["chosen"][:-1] + "y"
    (pair,), _ = read(tmp_path, {**row, "rejected": rejected}, adds_bos=True, **settings)
    assert pair.texts == (chosen, [*chosen[:-1], *ids("y")])
    assert pair.margin == 0.0


def test_margins_are_read_and_over_long_pairs_are_dropped_and_counted(tmp_path):
    rows = [
        {"prompt": "aa", "chosen": "x", "rejected": "y", "margin": 2},
        {"prompt": "aa", "chosen": "xxx", "rejected": "y"},
        {"prompt": "a", "chosen": "xx", "rejected": ""},
    ]
    pairs, report = read(tmp_path, *rows, reward={"max_tokens": 3})
    assert [(pair.id, pair.margin, *map(len, pair.texts)) for pair in pairs] == [(0, 2.0, 3, 3), (2, 0.0, 3, 1)]
    assert "2 of 3 pairs kept, 1 dropped for an over-long text; texts of 1 to 3 tokens (mean 2.5); columns" in report
    for settings, message in (({"max_tokens": 3}, "1 of 3 pairs"), ({"max_tokens": 2}, "3 of 3 pairs")):
        with pytest.raises(UserError, match=rf"^reward.max_tokens \d: {message} .* longer text: raise the limit"):
            read(tmp_path, *rows, reward=settings, over_long="refuse")
    with pytest.raises(
        UserError, match=r"^reward.max_tokens 1: all 1 pairs of .* have a longer text: raise the limit$"
    ):
        read(tmp_path, rows[0], reward={"max_tokens": 1})


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"answer": "x"}, {}, "reward.chosen_column chosen: .* has no such column: known are rejected, answer"),
        ({"chosen": "x"}, {"prompt_column": "question"}, "data.prompt_column question: .* has no such column"),
        ({"chosen": None}, {}, r"reward.chosen_column chosen: row 0 .* has None: give text, or chat"),
        ({"chosen": [USER("a")]}, {}, "reward.chosen_column chosen: row 0 .* that end with the assistant's$"),
        ({"prompt": "a", "chosen": [ASSISTANT("x")]}, {}, "reward.chosen_column chosen: .* its prompt is not a chat"),
        ({"chosen": [ASSISTANT("x")]}, {}, "reward.chosen_column chosen: .* its prompt is not a chat: give"),
        ({"chosen": "x"}, {"system_prompt": "s"}, "reward.chosen_column chosen: .* has no prompt, so it is not a chat"),
        ({"chosen": "x"}, {"chat_template": "always"}, "reward.chosen_column chosen: .* so it is not a chat"),
        ({"chosen": ""}, {}, "reward.chosen_column chosen: row 0 .* is empty: remove the row"),
        ({"chosen": [{"role": "judge", "content": "a"}, ASSISTANT("x")]}, {}, ".* cannot be tokenized: .*unknown role"),
        ({"chosen": "x", "margin": "large"}, {}, "reward.margin_column margin: row 0 .* has 'large': give a number"),
        ({"chosen": "x", "margin": float("nan")}, {}, "reward.margin_column margin: row 0 .* has nan: give a number"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_pair_is_named(tmp_path, row, settings, message):
    with pytest.raises(UserError, match=f"^{message}"):
        read(tmp_path, {"rejected": "y", **row}, **settings)


def test_a_chat_needs_a_template(tmp_path):
    with pytest.raises(
        UserError, match=r"^data.chat_template: row 0 .* the tokenizer of policy.model has no chat templ"
    ):
        read(tmp_path, {"chosen": [USER("a"), ASSISTANT("x")], "rejected": "y"}, template=None)
