import math

import pytest

from hybrid_grpo.data.words import language
from hybrid_grpo.features.cleaning.cleaner import answer_fault, encoding_fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("naïve café, 3 ≤ x², 数学, Größe 🙂\n\tnext", None),
        ("half \ufffd a letter", "U+FFFD"),
        ("a\x00b", "control character U+0000"),
        ("a\x85b", "control character U+0085"),
        ("a \ud83d b", "half of a surrogate pair, U+D83D"),
        ("CafÃ© au lait", "'Café au lait'"),
        ("It\u00e2\u20ac\u2122s new", "wrong encoding"),
    ],
)
def test_letters_that_were_decoded_wrongly_are_told_from_those_of_other_languages(text, fault):
    found = encoding_fault(text)
    assert found is None if fault is None else fault in found


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        *[
            (answer, None)
            for answer in ("42", 0, 0.0, False, "None of these", "so x = 2\n#### 2", r"\boxed{\frac{1}{2}}")
        ],
        *[(answer, None) for answer in (["assert f(1) == 2"], {"inputs": ["1"]}, "nano", r"it is \boxed 5")],
        *[(answer, "is missing") for answer in (None, math.nan)],
        *[(answer, "is empty") for answer in ("", " \n", [], {})],
        *[(answer, "stands for none") for answer in ("N/A", "nan", " null ", "?", "TBD")],
        ("so it is\n#### ", "####"),
        *[(answer, "boxed") for answer in (r"\boxed{}", r"thus \boxed{ }.", r"\boxed{12", r"\boxed")],
    ],
)
def test_answers_that_are_none(answer, fault):
    found = answer_fault(answer)
    assert found is None if fault is None else fault in found


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("How many apples does Tom have, if he buys 3 and then gives 2 of them away?", "en"),
        (r"Find all values of $x$ for which the function $\frac{x^2+3}{x-1}$ is not defined on the line.", "en"),
        ("Wie viele Äpfel hat Tom, wenn er 3 kauft und davon 2 an seine Schwester verschenkt?", "de"),
        ("Combien de pommes possède Tom s'il en achète 3 et en donne 2 à sa sœur ?", "fr"),
        ("汤姆买了3个苹果 又送给妹妹2个 他还剩下几个苹果", "zh"),
        ("Hvad er x + 1?", None),
        (r"\frac{1}{2} + 3 * 4 - 5 + 6 + 7 + 8", None),
    ],
)
def test_the_language_of_a_text_that_is_long_enough(text, code):
    assert language(text) == code
