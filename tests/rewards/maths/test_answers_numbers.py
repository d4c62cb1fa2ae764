"""Which number a text is, and where a completion states one."""

from fractions import Fraction

import pytest

from hybrid_grpo.rewards.maths.answers import parse_number, stated_number


@pytest.mark.parametrize(
    "text, number",
    [
        ("18", 18), ("+18", 18), ("-18", -18), ("\u221218", -18), (" 18 ", 18), ("18.", 18), ("18.0", 18), ("018", 18),
        ("1,234", 1234), ("1,234,567.50", Fraction("1234567.5")), ("1{,}234", 1234), (r"1,\!234", 1234),
        (".5", Fraction(1, 2)), ("0.5", Fraction(1, 2)), ("1/2", Fraction(1, 2)), ("-1 / 2", Fraction(-1, 2)),
        ("2/4", Fraction(1, 2)), (r"\frac{1}{2}", Fraction(1, 2)), (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\tfrac{-3}{4}", Fraction(-3, 4)), ("$18", 18), ("-$18", -18), ("$-18", -18), ("€18.50", Fraction("18.5")),
        (r"\$18", 18), ("$18$", 18), ("$$18.$$", 18), ("**18**", 18), ("**18.**", 18), ("`18`", 18), ("50%", 50),
        (r"50\%", 50), ("50 %.", 50), ("18 dollars", 18), ("18 km/h", 18), (r"18 \text{ dollars}", 18),
        (r"18\text{dollars}", 18), (r"18\,\mathrm{cm}", 18), ("0", 0), ("-0", 0), ("10 000", 10_000), ("90°", 90),
        (r"\frac12", Fraction(1, 2)),
    ],
)  # fmt: skip
def test_is_a_number(text: str, number: int | Fraction) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "", " ", ".", "-", "$", "%", "eighteen", "18 or 19", "18 or nineteen", "18, 19", "3 and a half", "18 19",
        "1,23", "1,2345", "12,34,567", "1.2.3", "1 3/4", r"1\frac{3}{4}", "1/2/3", "5/0", r"\frac{5}{0}", "2+3", "2*3",
        "2^3", "1e3", "3x", r"\sqrt{4}", r"2\pi", "--5", "-$-5", "(5)", "x = 5", "5!", "0x10", "inf", "nan", "1_000",
        "\u0661\u0662", "9" * 5000, r"\frac{1}{2}6", "5 million",
    ],
)  # fmt: skip
def test_is_not_a_number(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize(
    "text, number",
    [
        ("so 3 + 4 = 7\n#### 7", 7), ("####7", 7), ("#### 7\nQuestion: 5 apples?", 7), ("#### 6\nno, wait\n#### 7", 7),
        ("#### 7\n#### Step 2: check", 7), (r"Thus \boxed{7}.", 7), (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"\boxed{\text{about }7}", None), (r"\boxed{7 \text{ apples}}", 7), (r"#### \boxed{7}", 7),
        (r"\boxed{3} then #### 7", 7), (r"#### 3, so \boxed{7}", 7), (r"\boxed{{7}", None), (r"\boxed{7", None),
        ("#### 7 or 8", None), ("####", None), ("", None), ("the answer is 7", None),
    ],
)  # fmt: skip
def test_states_its_answer(text: str, number: int | Fraction | None) -> None:
    assert stated_number(text) == number


@pytest.mark.parametrize(
    "text, number",
    [
        ("The answer is 1,234.", 1234), ("so 10-3", 3), ("it fell to -3.5 degrees", Fraction("-3.5")),
        ("he owes -$5", -5), ("it costs $5.Then", 5), ("3 of 4, that is 3/4", Fraction(3, 4)), ("x12", None),
        ("5 apples on 12/25/2020", 5), ("version 1.2.3", None), ("7 then 5/0", None), ("none", None),
        ("#### 7\nand 9 more", 7),
    ],
)  # fmt: skip
def test_last_number_where_none_is_marked(text: str, number: int | Fraction | None) -> None:
    assert stated_number(text, last_number=True) == number


def test_runs_of_digits_and_braces_cost_little() -> None:
    """A policy that has gone astray repeats one token to the limit; int() refuses thousands of digits."""
    for text in ("9" * 20_000, "#### " + "9" * 20_000, r"\boxed{" * 2_000, "1,111" * 4_000, "#### 1/" * 3_000):
        assert stated_number(text, last_number=True) in (None, 1)
