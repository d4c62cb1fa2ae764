"""Held-out prompts in training prompts: every way to plant one is found, and nothing else is."""

import random

import pytest

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.features.cleaning.cleaner import clean
from hybrid_grpo.features.cleaning.overlap import OverlapIndex
from hybrid_grpo.features.cleaning.settings import CleanConfig

ASK = 'Think step by step, then give the final answer as a number behind the sign "####", with nothing after it.'


def question(rng, words):
    return " ".join(rng.choice(["ka", "lo", "mi", "nu", "re"]) + str(rng.randint(0, 999)) for _ in range(words))


def shouted(text, rng):
    return f"  {text.upper().replace(' ', ',   ')}!! "


def inside(text, rng):
    return f"{question(rng, 20)}. {text} {question(rng, 9)}?"


def part(text, rng):
    words = text.split()
    start = rng.randint(0, len(words) - 13)
    return f"{question(rng, 40)} {' '.join(words[start : start + 13])} {question(rng, 40)}"


def reworded(text, rng):
    words = text.split()
    for at in range(3, len(words), 8):
        words[at] = "other"
    return " ".join(words)


def chat(text, rng):
    return [{"role": "system", "content": question(rng, 30)}, {"role": "user", "content": [{"text": text}]}]


def equal(text, rng):
    return text


PLANTS = [
    *[(plant, words) for plant in (equal, shouted, chat) for words in (5, 10, 40)],
    # Part of a short prompt would be found by chance in others.
    *[(inside, 10), (inside, 40), (part, 40), (reworded, 40)],
]


@pytest.mark.parametrize(("plant", "words"), PLANTS)
def test_every_planted_prompt_is_found_and_nothing_else(plant, words):
    """All prompts but the chats end with the instruction of a task, which is longer than what makes an overlap."""
    rng = random.Random(0)
    held_out = [question(rng, words) for _ in range(100)]
    planted = [plant(text, rng) for text in held_out[::4]]
    rows = [question(rng, rng.choice([5, 10, 40])) for _ in range(200)] + planted
    prompts = [f"{row}\n{ASK}" if isinstance(row, str) else row for row in rows]
    ask = "" if plant is chat else f"\n{ASK}"
    data = DataConfig(path=[{"prompt": p} for p in prompts], eval_path=[{"prompt": t + ask} for t in held_out])
    _, report = clean(data, CleanConfig(answers="off"))
    assert [finding.row for finding in report.found["overlap"]] == list(range(200, 225))
    assert all(f"held-out row {4 * number}" in finding.why for number, finding in enumerate(report.found["overlap"]))


def test_signs_make_a_question_another_and_punctuation_does_not():
    index = OverlapIndex(["What is (2 + 3) * 4?"], [], 13)
    assert index.find("what is (2 + 3) * 4") == (0, "is equal to")
    assert index.find("What is 2 + 3 * 4?") is None and index.find("What is (2 - 3) * 4?") is None


def test_an_overlap_can_be_refused():
    data = DataConfig(path=[{"prompt": "a"}, {"prompt": "What now?"}], eval_path=[{"prompt": "what now"}])
    with pytest.raises(
        UserError, match=r"^clean.overlap: 1 rows of a list .* first is row 1, which is equal to held-out"
    ):
        clean(data, CleanConfig(overlap="refuse"))
    assert clean(data, CleanConfig(overlap="report"))[1].kept == [0, 1]
    assert clean(data, CleanConfig(overlap="drop"))[1].kept == [0]
