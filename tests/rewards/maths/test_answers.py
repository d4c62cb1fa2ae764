"""Final answers of mathematical problems, against a table of pairs and by properties."""

import re
import resource
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from maths_pairs import pairs

from hybrid_grpo.rewards.maths import answers, grader
from hybrid_grpo.rewards.maths.answers import math_answer, stated_answer

PAIRS = pairs()


def is_right(completion: str, gold: object) -> bool:
    return math_answer([completion], [gold]) == [1.0]


def test_table_is_large_and_of_both_kinds() -> None:
    rows = {(completion, gold) for _, completion, gold, _, _ in PAIRS}
    assert len(rows) == len(PAIRS) >= 400
    assert 1 / 3 < sum(right for *_, right, _ in PAIRS) / len(PAIRS) < 2 / 3


@pytest.mark.process
def test_table_is_marked_as_a_careful_grader_would() -> None:
    """97 % at least, and every miss is one that the table explains.

    Measured: 99.7 %. Of the same table plain math-verify 0.9 has 78 % right, the rule of the last number 55 %
    (`python tests/support/maths_pairs.py`).
    """
    misses = [row for row in PAIRS if is_right(row[1], row[2]) != row[3]]
    share = 1 - len(misses) / len(PAIRS)
    print(f"{len(PAIRS)} pairs, {share:.1%} right")
    listed = "\n".join(f"{kind}: {said[-60:]!r} for {gold!r}: {why}" for kind, said, gold, _, why in misses)
    assert share >= 0.97, listed
    assert all(why for *_, why in misses), listed
    assert len(misses) == sum(bool(why) for *_, why in PAIRS), "a pair that is explained as missed is right now"


def test_no_completion_takes_long() -> None:
    """Bombs, thousands of boxes and nested brackets included, where the gold answer is not worked out."""
    long = [
        r"\boxed{" * 20_000, r"\boxed{4} and " * 20_000, "#### 4\n" * 20_000, "answer is " * 20_000,
        "<answer>" * 20_000, "answer is" + " " * 100_000, r"\boxed{4}" + " " * 100_000 + r"\boxed{4}",
        r"\boxed{" + "((" * 2000 + "}",
        *(rf"\boxed{{{inside}}}" for inside in (
            "a" * 490 + "= 5", "1," * 240 + "1", "x_1" * 160 + " = 1", "5 cm " * 95, r"\pm 1 " * 80, "{(" * 240,
            "1:" * 240 + "1", "(1,(" * 120, r"2^{999}" * 70, "(" * 10 + "99^99" + ")^99" * 10, "0^{9^{9^9}}",
            "x=" + "1=" * 240 + "1", "x^{2000}" * 50, "+".join(f"1/x_{k}^{{2000}}" for k in range(30)), "x≠(" * 80,
            r"\{1\}\cap\{9^{9^{9^9}}\}", r"[0,1]\cap" * 19 + "[0,1]", r"\sum_{k=1}^{9^{9^{9^9}}} k^{9^9}",
        )),
    ]  # fmt: skip
    is_right(r"\boxed{\pi}", "3")  # imports what is imported once
    for text in long + [said for _, said, *_ in PAIRS]:
        start_s = time.process_time()
        is_right(text, r"(1,2)")
        assert time.process_time() - start_s < 1, text[:80]


@pytest.mark.parametrize(
    "format",
    ["{}", "{:,}", "{}.0", r"\boxed{{{}}}", r"\boxed{{\text{{{}}}}}", "{} apples", "{}%", r"{}^\circ", "x = {}"],
)
@given(number=st.integers(-(10**12), 10**12))
def test_integers_in_any_format(format: str, number: int) -> None:
    text = "#### " + format.format(number)
    assert is_right(text, number) and is_right(text, str(number)) and is_right(f"#### {number}", text)
    assert not is_right(text, number + 1) and not is_right(text, f"{number - 1:,}")
    assert is_right(text, -number) == (number == 0)


@given(top=st.integers(-(10**6), 10**6), bottom=st.integers(1, 10**6), by=st.integers(2, 99))
def test_fractions_in_any_format(top: int, bottom: int, by: int) -> None:
    gold = str(Fraction(top, bottom))
    sign, whole, rest = "-" * (top < 0), *divmod(abs(top), bottom)
    formats = [
        f"{top}/{bottom}", rf"\frac{{{top * by}}}{{{bottom * by}}}", rf"{sign}\dfrac{{{abs(top)}}}{{{bottom}}}",
        rf"{top} \div {bottom}", rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}" if whole else gold,
    ]  # fmt: skip
    for text in formats:
        assert is_right(rf"\boxed{{{text}}}", gold), text
        assert not is_right(rf"\boxed{{{text}}}", str(Fraction(top + 1, bottom))), text


@given(text=st.text(alphabet="0123456789abx+-*/^_(){}[],.=<>|!%$ \\π\n", max_size=60))
def test_any_text_is_its_own_answer_and_none_raises(text: str) -> None:
    assert is_right(rf"\boxed{{{text}}}", "(7,8)") in (True, False)
    if (stated := stated_answer(rf"\boxed{{{text}}}")) and any(letter.isalnum() for letter in stated):
        # The space keeps a backslash at the end from escaping the brace.
        assert math_answer([rf"\boxed{{{stated} }}"], [rf"\boxed{{{stated} }}"]) == [1.0]


def test_an_exponential_has_the_bounds_of_a_power() -> None:
    """Without them 1 more or less made no difference at 60 digits, and what is not computed counted as 0."""
    for stated, gold in ((r"\exp(-10^{20})", "0"), (r"\exp(10^{29})+1", r"\exp(10^{29})")):
        assert not is_right(rf"\boxed{{{stated}}}", gold)
    assert is_right(r"\boxed{\exp(2x)}", "e^{2x}") and is_right(r"\boxed{\exp(0)}", "1")


@pytest.mark.process
def test_what_math_verify_does_not_finish_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to run until the worker was ended, without a reward for the completion."""
    monkeypatch.setattr(grader, "_MATH_VERIFY_S", 1.0)
    gold, bomb = r"\sum_{k=1}^{5} 1", r"\sum_{k=1}^{9^{9^{9^9}}} k^{9^9}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert math_answer([rf"\boxed{{{said}}}" for said in (bomb, "9^{9^{9^9}}", "5")], [gold] * 3) == [0.0, 0.0, 1.0]
    assert not is_right(r"\boxed{5}", bomb)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 6


def test_only_boxes_where_that_is_asked() -> None:
    said = ["#### 4", "The answer is 4.", "<answer>4</answer>", r"\boxed{4}", "\\boxed{4}\n#### 5", r"\boxed{5}"]
    assert math_answer(said, ["4"] * 6, boxed_only=True) == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert math_answer(said, ["4"] * 6) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_does_not_apply_without_an_answer_and_reads_chats() -> None:
    chat = [{"role": "user", "content": r"\boxed{5}"}, {"role": "assistant", "content": r"\boxed{4}"}]
    assert math_answer([chat, chat, chat], [None, 4, 5]) == [None, 1.0, 0.0]
    assert math_answer(["#### 0.1", "#### 0.1"], [0.1, 0.2]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="empty"):
        math_answer(["#### 4"], [" "])


@pytest.mark.parametrize("gold", [True, {"value": 12}])
def test_an_answer_that_is_neither_text_nor_a_number_is_refused(gold: object) -> None:
    """Every completion was wrong, since none states `['12']` or `True`."""
    with pytest.raises(ValueError, match=re.escape(f"answer {gold!r} of the data set is neither text nor a number")):
        math_answer([r"\boxed{12}"], [gold])


def test_says_what_to_install_before_it_looks_at_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_HAS_MATH_VERIFY", False)
    with pytest.raises(ValueError, match=r"pip install 'hybrid_grpo\[math\]'"):
        math_answer([], [])
    monkeypatch.undo()
    assert math_answer([], []) == []
