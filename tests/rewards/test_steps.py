"""Where tokens end in the text they decode to, with the decoders that tokenizers of causal language models have."""

import random
from itertools import accumulate

import pytest
from byte_tokenizers import byte_level, sentencepiece

from hybrid_grpo.data.batch import Completion
from hybrid_grpo.rewards.steps import TokenEnds, token_steps

TEXTS = [
    "First, 3 + 4 = 7.\n\nSo the answer is 7.", "the the  the   the\n", " a leading space", "don't , stop .", "x",
    "größer als 漢字 und 🙂🙂 zugleich, naïve",
]  # fmt: skip


TOKENIZERS = {
    "byte level": lambda: byte_level(TEXTS[:2]),
    "sentencepiece": lambda: sentencepiece(TEXTS[:2]),
    # Spaces before punctuation are taken out of the decoded text.
    "cleaned": lambda: byte_level(
        TEXTS[:2],
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    ),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def check(tokenizer, token_ids: list[int]) -> None:
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    ends = TokenEnds(tokenizer)(token_ids, text)
    assert len(ends) == len(token_ids) and ends[-1] == len(text)
    for k, end in enumerate(ends, 1):
        before = tokenizer.decode(token_ids[:k], skip_special_tokens=True)
        # A prefix that ends within a character, or before something that is cleaned up, is none of the text.
        if text.startswith(before) and not before.endswith("\ufffd"):
            assert end == len(before), (k, before)


@pytest.mark.parametrize("text", TEXTS)
def test_ends_are_those_of_the_decoded_beginnings(tokenizer, text):
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    check(tokenizer, token_ids)
    check(tokenizer, [*token_ids, tokenizer.eos_token_id])
    check(tokenizer, [tokenizer.eos_token_id, *token_ids, tokenizer.eos_token_id, *token_ids])


def test_any_tokens_have_an_end_in_their_text(tokenizer):
    chosen = random.Random(0)
    token_ends = TokenEnds(tokenizer)
    for _ in range(50):
        token_ids = chosen.choices(range(len(tokenizer)), k=chosen.randint(1, 20))
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        ends = token_ends(token_ids, text)
        assert len(ends) == len(token_ids) and ends[-1] == len(text)
        assert all(0 <= end <= len(text) for end in ends)


def test_lines_of_a_text_are_steps(tokenizer):
    text = "First, 3 + 4 = 7.\n\nSo the answer is 7."
    token_ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    completion = Completion(token_ids, [], "stop", tokenizer.decode(token_ids, skip_special_tokens=True))
    text_steps = [(line, float(number)) for number, line in enumerate(completion.text.splitlines(keepends=True), 1)]
    steps = token_steps(text_steps, completion, TokenEnds(tokenizer))
    lengths = [len(tokenizer.decode(token_ids[: k + 1], skip_special_tokens=True)) for k in range(len(token_ids))]
    expected: dict[int, float] = {}
    for at, (_, reward) in zip(accumulate(len(line) for line, _ in text_steps), text_steps, strict=True):
        end = 1 + next(k for k, length in enumerate(lengths) if length >= at)
        expected[end] = expected.get(end, 0.0) + reward
    assert steps == sorted(expected.items()) and len(steps) > 1 and steps[-1][0] == len(token_ids) - 1


def test_a_completion_without_text_has_its_steps_at_the_first_token(tokenizer):
    empty = Completion([tokenizer.eos_token_id], [], "stop", "")
    assert token_steps([("", 1.0)], empty, TokenEnds(tokenizer)) == [(1, 1.0)]
    assert token_steps([], empty, TokenEnds(tokenizer)) == []
