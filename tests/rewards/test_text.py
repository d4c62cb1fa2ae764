"""Multiple choice and language; and that rules take linear time."""

import time

import pytest

from hybrid_grpo.rewards.rules import format_tags
from hybrid_grpo.rewards.text import language_penalty, multiple_choice


def chats(*texts: str) -> list:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    "completion",
    [
        "The answer is (B)", "The answer is B.", "the answer is (b).", "Answer: B", "**Answer:** B", "**Answer: B**",
        "Answer:\nB", "The correct answer is option B because it is warm", "The answer is: **B. Paris**",
        "The answer is **(B)**", "the right choice is B", r"\boxed{B}", r"so \boxed{\text{(B)}}.", r"$\boxed{b}$",
        r"\(\boxed{\mathrm{B}}\)", r"\boxed{B. Paris}", "<answer>B</answer>", "<answer> b </answer>", "**B**",
        "It is **B. Paris**", "B", "B.", "(B)", "B) Paris", "B. Paris, because", "Let me see.\n\nB", "Paris", "paris.",
        "I think A is wrong. B is the correct answer.", "The answer is A. No, the answer is B.", r"\boxed{A} \boxed{B}",
        "Option A is wrong.\n**A**\nThe answer is B.\nOption C is cold.", "The answer is B\n\nA. Rome\nC. Oslo",
        "**A** or **B**", "The answer is A or C. The answer is B",
        "Therefore, the correct answer is:\n\n**B) Paris**", r"The answer is \(B\).", "The answer is **Option B**.",
        "Answer - B", "The answer to the question is therefore (B), not A.", "The answer must be choice B",
        "### Answer: B", r"Final Answer: The final answer is $\boxed{B}$.",
    ],
)  # fmt: skip
def test_multiple_choice_right(completion: str) -> None:
    choices = ["Rome", "Paris", "Oslo", "I"]
    for answer in ("B", "b", 1, "Paris"):
        assert multiple_choice([completion], [answer], [choices]) == [1.0]
    assert multiple_choice(chats(completion), ["A"], [choices]) == [0.0]


@pytest.mark.parametrize(
    "completion",
    [
        "", "The answer is A bird", "A bird", "The answer is B or C", "The answer is (B) and (C)", "Rome or Paris",
        "The answer is not B", "The answer cannot be B", "The answer isn't B", "The answer is Berlin",
        r"\boxed{B^2}", r"\boxed{AB}", r"\boxed{B+C}", "Option B",
        "A. Rome\nB. Paris", "The answer is E", "The answer", "The answer is I think unknown",
    ],
)  # fmt: skip
def test_multiple_choice_that_chooses_nothing(completion: str) -> None:
    choices = ["Rome", "Paris", "Oslo", "I"]
    assert multiple_choice([completion] * 4, [0, 1, 2, 3], [choices] * 4) == [0.0] * 4


def test_multiple_choice_without_choices_and_without_an_answer() -> None:
    assert multiple_choice(["E", "E", "E"], ["E", 4, None]) == [1.0, 1.0, None]
    # Where choices are letters themselves, a letter is that of a choice.
    assert multiple_choice(["(B)", "(A)"], ["A", "A"], [["C", "A"]] * 2) == [0.0, 1.0]
    for answer in ("Paris", 26, -1, True, 1.0, ""):
        with pytest.raises(ValueError, match="answer"):
            multiple_choice(["B"], [answer])


def test_language_penalty_is_the_share_of_letters_of_other_scripts() -> None:
    texts = ["hello, ça va? 1 + 1", "привет", "hi 你好", "123 !", "x\u0301 \U0001d538 ª ｆ", "\U00010330b"]  # noqa: RUF001
    assert language_penalty(texts) == [0.0, -1.0, -0.5, 0.0, 0.0, -0.5]
    assert language_penalty(chats("漢字かなカナ々"), scripts=["han", "hiragana", "katakana"]) == [0.0]
    assert language_penalty(["2π r"], scripts=["latin", "greek"]) == [0.0]
    for scripts in ([], "latin", ["english"]):
        with pytest.raises(ValueError, match="scripts"):
            language_penalty([], scripts=scripts)


@pytest.mark.parametrize(
    "text",
    ["answer is ", "answer is (", "**A. ", "(", "{", r"\boxed{", "A ", " ", "\n", "*", "_", "<think>", "A.\n", "A or"],
)
@pytest.mark.parametrize("before", ["", "answer is ", "**A. ", "<answer>"])
def test_rules_take_linear_time(before: str, text: str) -> None:
    long = before + text * (100_000 // len(text))
    start = time.process_time()
    for rule in (format_tags, language_penalty):
        rule([long])
    multiple_choice([long], ["A"], [["x", "y"]])
    # About 0.1 s; quadratic in a hundred thousand characters is minutes.
    assert time.process_time() - start < 2.0
