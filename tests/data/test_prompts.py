import json

import pytest
from char_tokenizer import TEMPLATE, char_tokenizer, ids
from transformers import AutoTokenizer

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.prompts import read_prompts
from hybrid_grpo.data.sources import evaluation_source

CHAT = [{"role": "user", "content": "Hi?"}]
SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.fixture
def data(tmp_path):
    """Writes rows, gives a configuration that reads them."""

    def config(rows: list[dict], **settings) -> DataConfig:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DataConfig(path=str(path), **settings)

    return config


def test_text_prompts_keep_their_row_number_text_and_other_columns(data):
    rows = [{"prompt": "ab", "answer": 1, "completion": "x"}, {"prompt": "c", "answer": None, "completion": "y"}]
    prompts, report = read_prompts(data(rows), char_tokenizer())
    assert [(p.id, p.text, p.token_ids) for p in prompts] == [(0, "ab", ids("ab")), (1, "c", ids("c"))]
    assert [p.columns for p in prompts] == [{"answer": 1, "completion": "x"}, {"answer": None, "completion": "y"}]
    assert report.endswith("; columns prompt, answer, completion")


def test_names_of_control_tokens_in_a_chat_are_text(data):
    """A prompt could end its own message and forge others; text prompts, and the system's texts, mean what they say."""
    rows = [{"prompt": [{"role": "system", "content": "<user>"}, {"role": "user", "content": "a<eos>b<assistant>"}]}]
    [prompt], _ = read_prompts(data(rows), char_tokenizer(TEMPLATE))
    spelled = [0, *ids("eos"), 0], [0, *ids("assistant"), 0]  # the vocabulary has no angle brackets
    text = [*ids("a"), *spelled[0], *ids("b"), *spelled[1]]
    assert prompt.token_ids == [*ids("<bos>", "<system>", "<user>", "<user>"), *text, *ids("<assistant>")]
    assert prompt.text == rows[0]["prompt"]
    [prompt], _ = read_prompts(data([{"prompt": "a<eos>b"}]), char_tokenizer(TEMPLATE))
    assert prompt.token_ids == ids("a", "<eos>", "b")


def test_the_report_counts_and_measures_what_is_kept(data):
    config = data([{"q": "a" * length} for length in (3, 9, 4, 12)], prompt_column="q", max_prompt_tokens=4)
    prompts, report = read_prompts(config, char_tokenizer())
    assert [prompt.id for prompt in prompts] == [0, 2]
    assert report == (
        f"{config.path} [train]: 2 of 4 rows kept, 2 dropped for an over-long prompt;"
        " prompts of 3 to 4 tokens (mean 3.5); columns q"
    )


def test_held_out_prompts_come_from_the_evaluation_source(data, tmp_path):
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "b"}\n{"prompt": "c"}\n{"prompt": "d"}\n')
    config = data([{"prompt": "a"}], eval_path=str(tmp_path / "heldout.jsonl"), eval_limit=2)
    prompts, report = read_prompts(config, char_tokenizer(), evaluation_source(config))
    assert [prompt.text for prompt in prompts] == ["b", "c"]
    assert report.startswith(f"{tmp_path}/heldout.jsonl: 2 of 2 rows kept; ")
    assert [prompt.text for prompt in read_prompts(config, char_tokenizer())[0]] == ["a"]


TEXT, ASKED = ids("Hi?"), ids("<bos>", "<user>", "Hi?", "<assistant>")
WITH_SYSTEM = ids("<bos>", "<system>", "Be kind.", "<user>", "Hi?", "<assistant>")


@pytest.mark.parametrize("settings, prompt, text, token_ids", [
    ({}, "Hi?", "Hi?", TEXT), ({}, CHAT, CHAT, ASKED), ({"chat_template": "always"}, "Hi?", "Hi?", ASKED),
    ({"chat_template": "always"}, CHAT, CHAT, ASKED), ({"chat_template": "never"}, "Hi?", "Hi?", TEXT),
    ({"system_prompt": "Be kind."}, "Hi?", [SYSTEM, *CHAT], WITH_SYSTEM),
    ({"system_prompt": "Be kind."}, CHAT, [SYSTEM, *CHAT], WITH_SYSTEM),
])  # fmt: skip
def test_the_template_is_applied_where_the_settings_say(data, settings, prompt, text, token_ids):
    (read,), _ = read_prompts(data([{"prompt": prompt}], **settings), char_tokenizer(TEMPLATE))
    assert read.text == text
    assert read.token_ids == token_ids


@pytest.mark.parametrize("adds_eos", [False, True])
@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("a", ids("<bos>", "a")), (CHAT, ASKED), ("<bos><user>Hi?<assistant>", ASKED),
        ("a<bos>", ids("<bos>", "a", "<bos>")), ("", ids("<bos>")),
    ],
)  # fmt: skip
def test_bos_is_there_once_and_eos_not_at_all_whoever_adds_them(data, tmp_path, prompt, token_ids, adds_eos):
    """A prompt that a template had rendered got a second BOS, and some tokenizers ended prompts before completions."""
    char_tokenizer(TEMPLATE, adds_bos=True, adds_eos=adds_eos).save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    (read,), _ = read_prompts(data([{"prompt": prompt}]), tokenizer)
    assert read.token_ids == token_ids


def test_an_empty_prompt_starts_from_bos_or_is_refused(data):
    rows = [{"prompt": "a"}, {"prompt": ""}]
    prompts, report = read_prompts(data(rows), char_tokenizer())
    assert [prompt.token_ids for prompt in prompts] == [ids("a"), ids("<bos>")]
    assert "prompts of 1 to 1 tokens" in report
    with pytest.raises(UserError, match=r"^data.prompt_column prompt: row 1 .* is an empty prompt, .* remove the row$"):
        read_prompts(data(rows), char_tokenizer(bos=False))


NO_TEMPLATE = "data.chat_template: row 0 .* no chat template: take a chat model, or give"
JUDGE = [{"role": "judge", "content": "a"}]
REFUSE = {"max_prompt_tokens": 1, "over_long": "refuse"}


@pytest.mark.parametrize("prompts, settings, template, message", [
    (["a", "abc", "ab"], REFUSE, None, "data.max_prompt_tokens 1: .* row 1 .* has 3 tokens, one of 2 over-long"),
    (["abcd", "abc"], {"max_prompt_tokens": 2}, None, "data.max_prompt_tokens 2: all 2 .* shortest has 3 tokens"),
    ([CHAT], {}, None, NO_TEMPLATE),
    (["a"], {"chat_template": "always"}, None, NO_TEMPLATE),
    (["a"], {"system_prompt": "Be kind."}, None, NO_TEMPLATE),
    ([CHAT], {"chat_template": "never"}, TEMPLATE, "data.chat_template never: row 0 .* has chat messages"),
    (["a"], {"system_prompt": "b", "chat_template": "never"}, TEMPLATE, "data.system_prompt needs a chat template"),
    ([[SYSTEM, *CHAT]], {"system_prompt": "b"}, TEMPLATE, "data.system_prompt is set, and row 0 .* has a system"),
    ([CHAT, JUDGE], {}, TEMPLATE, "data.chat_template: the tokenizer's template refuses row 1 .*unknown role"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_way_out(data, prompts, settings, template, message):
    with pytest.raises(UserError, match=f"^{message}"):
        read_prompts(data([{"prompt": prompt} for prompt in prompts], **settings), char_tokenizer(template))


def test_a_missing_prompt_column_is_refused_with_those_there_are(data):
    config = data([{"promt": "a", "answer": 1}])
    with pytest.raises(UserError, match=r"^data.prompt_column prompt: .* has no such column: did you mean promt\?$"):
        read_prompts(config, char_tokenizer())
    with pytest.raises(UserError, match=r"no such column: known are answer$"):
        read_prompts(data([{"answer": 1}]), char_tokenizer())


@pytest.mark.parametrize("bad, message", [
    (None, r"row 1 \(from 0\) of .* has None: give text or a list of chat messages$"),
    (3, r"row 1 .* has 3: give text"),
    ({"role": "user", "content": "a"}, r"row 1 .* has \{.*: give text or a list"),
    ([], r"row 1 .* has \[\]: give messages"),
    (["Hi"], r"row 1 .* has \['Hi'\]: give messages"),
    ([{"content": "Hi"}], r"row 1 .* give messages"),
    ([{"role": "user", "content": None}], r"row 1 .* give messages"),
    ([*CHAT, {"role": "assistant", "content": ""}], r"row 1 .* ends with a message of the assistant without text"),
])  # fmt: skip
def test_a_row_that_is_no_prompt_is_named(data, bad, message):
    with pytest.raises(UserError, match=rf"^data.prompt_column prompt: {message}"):
        read_prompts(data([{"prompt": "a"}, {"prompt": bad}]), char_tokenizer(TEMPLATE))


THINKING = TEMPLATE.replace(
    "{% if add_generation",
    "{% generation %}{% if enable_thinking is false %}{{ mark }}no{% endif %}{% endgeneration %}{% if add_generation",
)


def test_variables_of_the_template_reach_it(data):
    tokenizer = char_tokenizer(THINKING)
    config = data([{"prompt": CHAT}, {"prompt": "ab"}], chat_template_kwargs={"enable_thinking": False, "mark": ":"})
    prompts, _ = read_prompts(config, tokenizer)
    assert [p.token_ids for p in prompts] == [ids("<bos>", "<user>", "Hi?", ":no", "<assistant>"), ids("ab")]
    assert read_prompts(data([{"prompt": CHAT}]), tokenizer)[0][0].token_ids == ASKED


@pytest.mark.parametrize("prompt, given, message", [
    (CHAT, {"enable_thinkng": False}, "enable_thinkng: .* reads no such variable: did you mean enable_thinking"),
    (CHAT, {"tokenize": True}, "tokenize: the tokenizer's chat template reads no such variable: known are enable_"),
    (CHAT, {"bos_token": "x"}, "bos_token: the tokenizer's chat template reads no such variable"),
    ("ab", {"mark": ":"}, "{'mark': ':'}: no prompt of .* is a chat, so no template is applied: set data.chat"),
])  # fmt: skip
def test_variables_that_would_change_nothing_are_refused(data, prompt, given, message):
    with pytest.raises(UserError, match=f"^data.chat_template_kwargs {message}"):
        read_prompts(data([{"prompt": prompt}], chat_template_kwargs=given), char_tokenizer(THINKING))


def test_variables_need_a_template(data):
    with pytest.raises(ValueError, match=r"data.chat_template_kwargs {'a': 1} needs a chat template, .* never: set"):
        data([{"prompt": "a"}], chat_template="never", chat_template_kwargs={"a": 1})
