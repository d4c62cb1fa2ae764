"""The tokens of two tokenizers over one text: no byte is lost or counted twice, and none changes its place."""

from __future__ import annotations

import random
from itertools import accumulate, groupby
from typing import Any

import pytest
import torch
from byte_tokenizers import byte_level, sentencepiece
from char_tokenizer import char_tokenizer
from tokenizers import AddedToken, normalizers

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.features.teacher.spans import NOT_TEXT, Aligner, Alignment, TokenBytes, aligned, check_spelling, spread

TEXTS = ["the answer is 12 + 30 = 42.\n\nSo the  the", "größer als 漢字 und 🙂🙂 zugleich, naïve"]
LETTERS = [*"  aehnrst.,1=\n", "é", "ß", "漢", "字", "🙂", "the", " answer", "\u0301", "<eos>", "▁"]
BYTES, MERGED, PIECE = byte_level(TEXTS, merges=1), byte_level(TEXTS, merges=120), sentencepiece(TEXTS)
# As Gemma's, two spaces are an added token.
SPACES = sentencepiece([*TEXTS, "a  b  c  d"])
SPACES.add_tokens(AddedToken("▁▁", normalized=False))
PAIRS = [(BYTES, MERGED), (MERGED, BYTES), (PIECE, MERGED), (MERGED, PIECE), (MERGED, byte_level(TEXTS[:1]))]
PAIRS += [(SPACES, MERGED), (MERGED, SPACES)]


def texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(LETTERS, k=draw.randrange(1, 30))) for _ in range(count)]


def pieces(tokenizer: Any, ids: list[int]) -> list[bytes]:
    """The bytes of tokens that are text."""
    of_token = TokenBytes(tokenizer)
    return [piece for token in ids if (piece := of_token(token)) is not None]


def by_span(spans: list[int], pieces: list[bytes]) -> list[bytes]:
    return [b"".join(piece for _, piece in of) for _, of in groupby(zip(spans, pieces, strict=False), lambda of: of[0])]


@pytest.mark.parametrize("own, theirs", PAIRS, ids=range(len(PAIRS)))
def test_bytes_and_log_probabilities_are_preserved_in_order(own: Any, theirs: Any) -> None:
    """Of texts as their tokenizer splits them, and of tokens drawn at random, as a policy may sample them."""
    draw, compared = random.Random(1), 0
    sampled = [own(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] for text in texts(150, 0)]
    sampled += [draw.choices(range(1, len(own)), k=draw.randrange(1, 12)) for _ in range(150)]
    for ids in sampled:
        alignment = Aligner(own, theirs, theirs.eos_token_id)(ids, ended=False, most=1000)
        here, there = pieces(own, ids), pieces(theirs, alignment.teacher_ids)
        count = len(alignment.spans)
        assert by_span(alignment.spans, here) == by_span(alignment.teacher_spans, there)
        assert b"".join(here[:count]) == b"".join(there)
        # The smallest spans: no two neighbors can be cut at a common end.
        ends, their_ends = ({*accumulate(map(len, side))} for side in (here[:count], there))
        assert len({*alignment.spans}) == len(ends & their_ends)
        compared += count
        logp_T = -5 * torch.rand(len(ids), dtype=torch.float64)
        their_U = -5 * torch.rand(len(alignment.teacher_ids), dtype=torch.float64)
        teacher_T, size_T = spread(logp_T, their_U, alignment)
        assert float(teacher_T[:count].sum()) == pytest.approx(float(their_U.sum()), abs=1e-12)
        after = [t for t in range(count, len(ids)) if t != alignment.fault]
        assert torch.equal(teacher_T[after], logp_T[after]) and not size_T[after].any()
        if alignment.fault is not None:
            assert alignment.fault >= count and (teacher_T[alignment.fault], size_T[alignment.fault]) == (NOT_TEXT, 1)
        gap_T = (logp_T - teacher_T) * size_T
        for span in {*alignment.spans}:
            at, there_at = ([s == span for s in of] for of in (alignment.spans, alignment.teacher_spans))
            gap = logp_T[:count][at].sum() - their_U[there_at].sum()
            assert gap_T[:count][at].tolist() == pytest.approx([float(gap)] * sum(at), abs=1e-12)
    assert compared > 0.4 * sum(map(len, sampled))


@pytest.mark.parametrize("own, theirs", PAIRS[:2], ids=range(2))
def test_valid_texts_are_compared_whole(own: Any, theirs: Any) -> None:
    """If both tokenizers are byte-level. The end of one is compared with the end of the other."""
    for text in texts(100, 2):
        ids = [*own(text, add_special_tokens=False, split_special_tokens=True)["input_ids"], own.eos_token_id]
        alignment = Aligner(own, theirs, theirs.eos_token_id)(ids, ended=True, most=1000)
        assert len(alignment.spans) == len(ids) and alignment.teacher_ids[-1] == theirs.eos_token_id
        assert b"".join(pieces(theirs, alignment.teacher_ids)).decode() == text
        assert alignment.spans[-1] == alignment.teacher_spans[-1] == max(alignment.spans[:-1]) + 1
        assert alignment.spans.count(alignment.spans[-1]) == 1
        cut = Aligner(own, theirs, theirs.eos_token_id)(ids, ended=True, most=len(alignment.teacher_ids) - 1)
        assert len(cut.teacher_ids) < len(alignment.teacher_ids) and len(cut.spans) < len(ids)


def test_what_is_not_text_ends_the_comparison() -> None:
    """A character that is cut, a special token between texts, an id that is no token, and a completion of no text."""
    smile, end = BYTES("🙂")["input_ids"], BYTES.eos_token_id
    align, hi = Aligner(BYTES, MERGED, MERGED.eos_token_id), BYTES("hi")["input_ids"]

    def compared(ids: list[int], ended: bool = True, most: int = 1000) -> tuple[int, int | None]:
        """How many tokens are compared, and which one the teacher cannot write."""
        found = align(ids, ended=ended, most=most)
        return len(found.spans), found.fault

    assert compared([*hi, *smile]) == (6, None)
    assert compared([*hi, *smile[:3]], ended=False) == (2, None), "cut within a character, which may become one"
    assert compared([*hi, *smile[:3], end]) == (2, 2) and compared([*hi, *smile[1:], *hi, end]) == (2, 2)
    assert compared([*hi, end, *hi]) == (2, 2) and compared([*hi, 10**6, *hi]) == (2, 2)
    assert compared([*hi, end]) == (3, None) and compared([*hi, end], ended=False) == (2, 2)
    assert compared([*hi, *hi, *hi, end], most=2) == (2, None), "the teacher reads no further"
    assert align([end], ended=True, most=9) == Alignment([MERGED.eos_token_id], [0], [0])
    assert align(smile[1:], ended=True, most=9) == Alignment([], [], [], 0)
    composed = byte_level(TEXTS)
    composed.backend_tokenizer.normalizer = normalizers.NFC()
    found = Aligner(BYTES, composed, None)(BYTES("xe\u0301y")["input_ids"], ended=False, most=9)
    assert (len(found.spans), found.fault) == (1, 1), "the letter that the teacher reads as another"
    logp_T = torch.tensor([-1.0, -2.0])
    assert [of.tolist() for of in spread(logp_T, logp_T[:0], Alignment([], [], []))] == [[-1.0, -2.0], [0.0, 0.0]]


def test_spans_end_where_the_bytes_begin_to_differ() -> None:
    assert aligned([b"ab", b"c", b"d"], [b"a", b"bc", b"x"]) == ([0, 0], [0, 0], 3)
    assert aligned([b"a", b"", b"b"], [b"a", b"b"]) == ([0, 0, 1], [0, 1], 2)
    assert aligned([b"ab"], [b"b"]) == ([], [], 0) and aligned([], [b"a"]) == ([], [], 0)


def test_tokenizers_that_change_a_text_are_refused() -> None:
    lower = byte_level(TEXTS)
    lower.backend_tokenizer.normalizer = normalizers.Replace("x", "y")
    with pytest.raises(
        UserError, match=r"teacher.model m: its tokens of .* spell .*y'.*: take a model whose tokenizer"
    ):
        check_spelling(lower, "teacher.model m")
    for tokenizer in (MERGED, PIECE, SPACES):
        check_spelling(tokenizer, "teacher.model m")
    with pytest.raises(UserError, match=r"policy\.model p: its tokens of 'a b' spell"):
        check_spelling(char_tokenizer(), "policy.model p", text="ab", keeps=False)
