import pytest

from hybrid_grpo.generation import Sampling
from hybrid_grpo.generation.sampler import text_ends


def letters(token_ids):
    return "".join(map(chr, token_ids))


def utf8(token_ids):
    """A token is a byte."""
    return bytes(token_ids).decode(errors="replace")


def first_end(text, sampling, decode=letters):
    """The number of tokens after which `text` ends, or None."""
    ids = list(text.encode()) if decode is utf8 else list(map(ord, text))
    return next((n for n in range(1, len(ids) + 1) if text_ends(ids[:n], sampling, decode)), None)


@pytest.mark.parametrize(
    ("strings", "end"),
    [((), None), (("x",), None), (("a",), 2), (("ana",), 4), (("nana", "an"), 3), (("banana!",), 7), (("!b",), None)],
)
def test_text_ends_with_the_token_that_completes_a_string(strings, end):
    assert first_end("banana!", Sampling(99, stop_strings=strings)) == end


def test_characters_of_several_tokens():
    text = "né €🙂🙂 x"
    for string in ("é", "€", "🙂", "🙂🙂", "é €🙂🙂 x"):
        end = len(text[: text.index(string) + len(string)].encode())
        assert first_end(text, Sampling(99, stop_strings=(string,)), utf8) == end


def test_only_the_end_is_decoded():
    seen = []

    def decode(token_ids):
        seen.append(len(token_ids))
        return letters(token_ids)

    assert not text_ends([ord("a")] * 10_000, Sampling(99_999, stop_strings=("xyz", "x")), decode)
    assert seen == [4 + 4 * 3]


@pytest.mark.parametrize(("min_tokens", "end"), [(0, 2), (2, 2), (3, 6), (6, 6), (7, 9), (10, None)])
def test_strings_before_the_minimum_are_passed_over_for_good(min_tokens, end):
    """However near the minimum they stand: they used to end a completion at it while they were in what is decoded."""
    assert first_end("..--..-..", Sampling(99, stop_strings=("..",), min_tokens=min_tokens)) == end


def test_strings_need_a_decoder_and_none_need_none():
    assert not text_ends([1, 2], Sampling(9), None)
    with pytest.raises(AssertionError, match="stop strings need `decode`"):
        text_ends([1, 2], Sampling(9, stop_strings=("x",)), None)
