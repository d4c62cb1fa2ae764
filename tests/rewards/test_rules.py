"""The built-in reward functions, on text and on chat completions."""

import inspect
import math

import pytest

from hybrid_grpo.rewards.functions import BUILTINS
from hybrid_grpo.rewards.maths.answers import numeric_answer
from hybrid_grpo.rewards.rules import (
    exact_match,
    format_regex,
    format_tags,
    letters_in_place,
    repeated_share,
    repetition_penalty,
)


def chats(*texts: str) -> list:
    return [[{"role": "assistant", "content": text}] for text in texts]


GSM8K = "He sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nThat is 9 * 2 = $<<9*2=18>>18.\n#### 18"


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("#### 18", GSM8K), ("#### 18", "18"), ("#### 18", 18), ("#### 18", 18.0), ("#### 18 dollars", GSM8K),
        ("a\n\n#### **18**\n", GSM8K), (r"\boxed{\frac{36}{2}}", GSM8K), ("#### 1234", "#### 1,234"), ("#### -$5", -5),
        ("#### 1/10", 0.1), ("#### 50", "50%"), (r"\boxed{50\%}", "#### 50"), (r"\boxed{0.5}", r"\boxed{\frac{1}{2}}"),
    ],
)  # fmt: skip
def test_numeric_answer_right(completion: str, answer: object) -> None:
    assert numeric_answer([completion], [answer]) == [1.0]
    assert numeric_answer(chats(completion), [answer]) == [1.0]


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("18", GSM8K), ("#### 19", GSM8K), ("#### -18", GSM8K), ("#### 18 or 19", GSM8K), ("#### 18\n#### 19", GSM8K),
        (r"#### 18 \boxed{19}", GSM8K), (r"\boxed{}", GSM8K), ("# 18", GSM8K), ("### 18", GSM8K), ("#### 18.01", GSM8K),
        ("#### 0.33", "1/3"), ("#### 0.5", "50%"), ("", GSM8K), (r"\boxed{1\frac{1}{2}}", "11/2"),
        ("#### 1.234", "1,234"),
    ],
)  # fmt: skip
def test_numeric_answer_wrong(completion: str, answer: object) -> None:
    assert numeric_answer([completion], [answer]) == [0.0]
    assert numeric_answer(chats(completion), [answer]) == [0.0]


def test_numeric_answer_does_not_apply_without_an_answer_and_refuses_one_that_is_no_number() -> None:
    assert numeric_answer(["#### 1", "#### 1"], [None, 1]) == [None, 1.0]
    for gold in ("x^2", "", math.nan, True, "#### none"):
        with pytest.raises(ValueError):
            numeric_answer(["#### 1"], [gold])


def test_exact_match() -> None:
    assert exact_match([" abc\n", "abd", "", "5"], ["abc ", "abc", "", 5]) == [1.0, 0.0, 1.0, 1.0]
    assert exact_match(chats("abc", "Abc", "x"), ["abc", "abc", None]) == [1.0, 0.0, None]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("42", 42.0, 1), ("42.0", 42, 1), ("42", "42.0", 0), ("41", 42.0, 0), ("x", 42, 0), ("0.1", 0.1, 1),
        ("b", ["a", "b "], 1), ("42", ["x", 42.0], 1), ("c", ["a", "b"], 0), ("1_0", 10, 0),
    ],
)  # fmt: skip
def test_a_gold_answer_of_another_type(completion, answer, reward):
    """A list or 42.0 was compared as Python writes it, so that every completion was wrong."""
    assert exact_match([completion], [answer]) == [reward]


def test_a_gold_answer_that_is_none_is_refused():
    for gold in (True, math.nan, {"value": 3}, [], [None], [["a"]]):
        for rule in (exact_match, letters_in_place, numeric_answer):
            with pytest.raises(ValueError, match=r"answer|list"):
                rule(["a"], [gold])
    assert numeric_answer(["#### 3"], [["2", 3.0]]) == [1.0] and letters_in_place(["ab"], [["xb", "a"]]) == [0.5]


def test_format_regex_matches_the_whole_over_lines() -> None:
    pattern = r"<think>.*?</think>\s*<answer>.*?</answer>"
    good = "<think>a\nb</think>\n<answer>c</answer>"
    assert format_regex([good, good + ".", "x" + good, ""], pattern=pattern) == [1.0, 0.0, 0.0, 0.0]
    assert format_regex(chats(good), pattern=pattern) == [1.0]


def test_repeated_share_counts_runs_of_anything() -> None:
    assert repeated_share([5] * 12, 3) == 0.9 and repeated_share("abab", 2) == 1 - 2 / 3
    assert repeated_share([], 3) == repeated_share([1, 2], 3) == 0.0


def test_repetition_penalty_is_the_share_of_repeated_ngrams() -> None:
    loop, all_new, half = [5] * 12, list(range(12)), [1, 2, 3, 1, 2, 3]
    assert repetition_penalty([loop, all_new, half, [1, 1], []]) == [1 / 10 - 1, 0.0, 3 / 4 - 1, 0.0, 0.0]
    assert repetition_penalty([half], ngram=1) == [-0.5]
    assert repetition_penalty([half], ngram=6) == [0.0]
    with pytest.raises(ValueError, match="ngram"):
        repetition_penalty([half], ngram=0)


def test_letters_in_place() -> None:
    assert letters_in_place(["abc", "abd", "cab", "", "ab"], ["abc"] * 5) == [1.0, 2 / 3, 0.0, 0.0, 2 / 3]
    assert letters_in_place([""], [""]) == [1.0]
    assert letters_in_place(chats(" abc "), ["abc"]) == [1.0]
    assert letters_in_place(["abc"], [None]) == [None]


def test_letters_in_place_does_not_pay_for_writing_on() -> None:
    rewards = letters_in_place(["abc" + "abc" * n for n in range(5)], ["abc"] * 5)
    assert rewards == sorted(rewards, reverse=True) and rewards[0] == 1.0 and rewards[4] == 3 / 15


@pytest.mark.parametrize("text, steps", [
    ("abd", [("a", 1 / 3), ("b", 1 / 3), ("d", 0.0)]),
    ("bbc", [("b", 0.0), ("b", 1 / 3), ("c", 1 / 3)]),
    # What is written beyond the answer costs, at the place where it is written.
    ("abcab", [("a", 1 / 3), ("b", 1 / 3), ("c", 1 / 3), ("a", 3 / 4 - 1), ("b", 3 / 5 - 3 / 4)]),
    (" a ", [(" ", 0.0), ("a", 1 / 3)]),
    ("", 0.0),
])  # fmt: skip
def test_letters_in_place_step_by_step(text, steps) -> None:
    (found,) = letters_in_place([text], ["abc"], steps=True)
    (whole,) = letters_in_place([text], ["abc"])
    if steps == 0.0:
        assert found == whole == 0.0
        return
    assert [piece for piece, _ in found] == [piece for piece, _ in steps]
    assert [reward for _, reward in found] == pytest.approx([reward for _, reward in steps])
    assert sum(reward for _, reward in found) == pytest.approx(whole)
    assert letters_in_place([text], [None], steps=True) == [None]


GOOD = "<think>a\n<b></think>\n<answer>c</answer>\n"


@pytest.mark.parametrize(
    "completion, strict, loose",
    [
        (GOOD, 1, 1), ("<think></think><answer></answer>", 1, 1), ("x" + GOOD, 0, 1), (GOOD + "x", 0, 1),
        ("<think>a</think>x<answer>b</answer>", 0, 1), ("<answer>b</answer><think>a</think>", 0, 0),
        ("<think>a<answer>b</answer></think>", 0, 0), (GOOD + GOOD, 0, 0), ("<think>a</think><answer>b", 0, 0),
        ("<think>a<think>b</think><answer>c</answer>", 0, 0), ("</think>a<think><answer>c</answer>", 0, 0), ("", 0, 0),
    ],
)  # fmt: skip
def test_format_tags(completion: str, strict: int, loose: int) -> None:
    assert format_tags([completion]) == format_tags(chats(completion)) == [strict]
    assert format_tags([completion], strict=False) == [loose]


def test_format_tags_has_part_of_it_where_that_is_wanted() -> None:
    texts = [GOOD, "x" + GOOD, "<think>a<answer>b</answer>", "<think><think>", ""]
    assert format_tags(texts, partial=True) == [1.0, 0.5, 0.375, 0.0, 0.0]


def test_format_tags_of_a_template_that_opens_the_first_one() -> None:
    assert format_tags(["a</think><answer>b</answer>", GOOD], opened=True) == [1.0, 0.0]
    assert format_tags(["<plan>a</plan>"], tags=["plan"]) == [1.0]


@pytest.mark.parametrize("tags", [[], "think", ["a", "a"], ["<a>"], [1]])
def test_format_tags_refuses_what_are_no_tags(tags: object) -> None:
    with pytest.raises(ValueError, match="tags"):
        format_tags([], tags=tags)


def test_every_builtin_takes_its_settings_by_keyword_and_says_what_it_does() -> None:
    named = {exact_match, letters_in_place, format_regex, format_tags, repetition_penalty}
    rules = {name for name, builtin in BUILTINS.items() if builtin.module == "rules"}
    assert {f.__name__ for f in named} == rules
    for function in named:
        name = function.__name__
        assert (BUILTINS[name].called == "inline") == (name != "format_regex"), "it may take long"
        kinds = {p.name: p.kind for p in inspect.signature(function).parameters.values()}
        columns = {n for n, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
        assert columns <= {"completions", "completion_ids", "answer"}, name
        assert function.__doc__
