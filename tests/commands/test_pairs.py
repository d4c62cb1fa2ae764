import json

import pytest
from char_tokenizer import TEMPLATE, char_tokenizer, ids

from hybrid_grpo.commands.pairs import read_pairs
from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.prompts import read_prompts


@pytest.fixture
def data(tmp_path):
    """Writes rows of (prompt, completion), gives a configuration that reads them."""

    def config(*rows: tuple, **settings) -> DataConfig:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": row[0], "completion": row[1]}) + "\n" for row in rows))
        return DataConfig(path=str(path), **settings)

    return config


@pytest.mark.parametrize("completion, completion_ids", [
    ("cd", ids("cd", "<eos>")),
    ("", ids("<eos>")),
    ("cd<eos>", ids("cd", "<eos>")),
    ("cd<eos> <eos> ", ids("cd", "<eos>")),
    ([{"role": "assistant", "content": "cd"}], ids("cd", "<eos>")),
])  # fmt: skip
def test_a_completion_has_one_eos_at_its_end_and_no_bos(data, completion, completion_ids):
    (pair,), _ = read_pairs(data(("ab", completion)), char_tokenizer(adds_bos=True, adds_eos=True), 10)
    assert pair.prompt.token_ids == ids("<bos>", "ab")
    assert pair.completion_ids == completion_ids


ENDED = TEMPLATE.replace("{{ message.content }}", "{{ message.content }}<system>")
CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("template, ends, prompt, completion, token_ids", [
    (ENDED, ["<eos>", "<system>"], CHAT, "c", ids("c", "<system>")),
    (ENDED, ["<eos>", "<system>"], CHAT, "c<system> <eos>", ids("c", "<system>")),
    (ENDED, ["<eos>", "<system>"], CHAT, "c<eos>", ids("c", "<eos>")),
    (ENDED, ["<eos>", "<system>"], "a", "c", ids("c", "<eos>")),
    (ENDED, ["<eos>"], CHAT, "c", ids("c", "<eos>")),
    (TEMPLATE, ["<eos>", "<system>"], CHAT, "c", ids("c", "<eos>")),
])  # fmt: skip
def test_an_answer_in_a_chat_ends_with_the_token_of_the_template(data, template, ends, prompt, completion, token_ids):
    """If that ends what the policy samples: Gemma's `<end_of_turn>` is not its end-of-sequence token."""
    (pair,), _ = read_pairs(data((prompt, completion)), char_tokenizer(template), 10, ends=ids(*ends))
    assert pair.completion_ids == token_ids


def test_prompts_are_those_that_the_policy_later_samples_from(data):
    config = data(("ab", "x"), ([{"role": "user", "content": "c"}], "y"), system_prompt="Be kind.")
    pairs, _ = read_pairs(config, char_tokenizer(TEMPLATE), 10)
    prompts, _ = read_prompts(config, char_tokenizer(TEMPLATE))
    assert [pair.prompt for pair in pairs] == prompts


def test_over_long_rows_are_dropped_and_counted_apart(data):
    """Lengths count end-of-sequence; a row that is over both limits counts as an over-long prompt."""
    config = data(("a", "xx"), ("a", "xxx"), ("aaaa", "x"), ("aaaa", "xxxx"), ("aa", "x"), max_prompt_tokens=3)
    pairs, report = read_pairs(config, char_tokenizer(), max_completion_tokens=3)
    assert [pair.prompt.id for pair in pairs] == [0, 4]
    assert [pair.completion_ids for pair in pairs] == [ids("xx", "<eos>"), ids("x", "<eos>")]
    assert "2 of 5 rows kept, 2 dropped for an over-long prompt, 1 dropped for an over-long completion;" in report
    assert "(mean 1.5)" in report


def test_completions_that_are_all_too_long_are_refused(data):
    with pytest.raises(UserError, match=r"^sft.max_completion_tokens 2: all 2 completions .* has 3 tokens: raise"):
        read_pairs(data(("a", "xx"), ("a", "xxx")), char_tokenizer(), 2)


@pytest.mark.parametrize("bad", [
    None, 7, [], [{"role": "user", "content": "a"}], [{"role": "assistant", "content": None}],
    [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
])  # fmt: skip
def test_a_row_that_has_no_completion_is_named(data, bad):
    with pytest.raises(UserError, match=r"^data.completion_column completion: row 1 .* give text or a list of one"):
        read_pairs(data(("a", "x"), ("b", bad)), char_tokenizer(), 10)


def test_a_missing_column_or_eos_is_refused(data):
    with pytest.raises(
        UserError, match=r"^data.completion_column answer: .* has no such column: known are prompt, completion$"
    ):
        read_pairs(data(("a", "x"), completion_column="answer"), char_tokenizer(), 10)
    with pytest.raises(UserError, match=r"^data.completion_column and data.prompt_column are both prompt"):
        read_pairs(data(("a", "x"), completion_column="prompt"), char_tokenizer(), 10)
    with pytest.raises(UserError, match=r"^policy.model: its tokenizer has no end-of-sequence token"):
        read_pairs(data(("a", "x")), char_tokenizer(eos=False), 10)
