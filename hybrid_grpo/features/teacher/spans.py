"""Aligns the tokens of two tokenizers over one text: the smallest spans at whose ends both have the end of a token.

As in GOLD (Hugging Face, 2025), which extends ULD (arXiv:2402.12030), tokens are aligned by the bytes of their text.
The log-probability of a span is the sum of those of its tokens (chain rule), so the sums over all spans are the
log-probabilities of the text under both models. Only the text that was sampled is compared, not the vocabularies.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.config.errors import refuse

NOT_TEXT = -20.0
"""Log-probability, in nats, that a teacher is taken to give a token that it cannot write. Its real one is minus
infinity; without any, the policy would learn to end the comparison by such a token, which would cost it nothing."""
_PROBE = " a  b\n1.é日🦊x"
"""Text with repeated spaces and characters of one to four bytes."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF_LETTER = {chr(byte): byte for byte in _VISIBLE}
_BYTE_OF_LETTER |= {chr(256 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_VISIBLE}))}
"""GPT-2's letters for bytes, which byte-level tokenizers use."""


class TokenBytes:
    """The bytes of each token of a tokenizer. Special tokens, and ids that are not tokens, have none.

    Reads byte-level tokenizers, those that write spaces as `▁` and may fall back to bytes (SentencePiece), and those
    whose tokens are plain text. `check` finds out whether a tokenizer is one of these.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {id: (token.content, token.special) for id, token in tokenizer.added_tokens_decoder.items()}
        # As it is pickled, which takes no time; the whole tokenizer as text takes seconds.
        part = tokenizer.backend_tokenizer.decoder
        decoder = "" if part is None else part.__getstate__().decode()
        self._by_letter, self._falls_back = '"ByteLevel"' in decoder, '"ByteFallback"' in decoder
        self._space = "▁" if "▁" in decoder else " "
        self._known: dict[int, bytes | None] = {}

    def __call__(self, token: int) -> bytes | None:
        """Return the bytes of a token; None if it is not text."""
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> bytes | None:
        text, special = self._added.get(token) or (self._tokenizer.convert_ids_to_tokens(token), False)
        if text is None or special or token in self._tokenizer.all_special_ids:
            return None
        if token not in self._added:
            if self._by_letter and all(letter in _BYTE_OF_LETTER for letter in text):
                return bytes(_BYTE_OF_LETTER[letter] for letter in text)
            if self._falls_back and (byte := _BYTE.fullmatch(text)):
                return bytes.fromhex(byte[1])
        # Gemma's repeated spaces are added tokens, written with ▁ as its other tokens are.
        return str(text).replace(self._space, " ").encode()


def aligned(own: Sequence[bytes], theirs: Sequence[bytes]) -> tuple[list[int], list[int], int]:
    """Return the number of the span, from 0, of each token of both sides, given the bytes of the tokens; and the number
    of bytes at the beginning that are equal.

    A span ends where a token of each side ends. Tokens after the last such end, or after the first byte in which the
    sides differ, belong to no span and are left out.
    """
    ends, their_ends = (list(accumulate(map(len, side))) for side in (own, theirs))
    text, their_text = b"".join(own), b"".join(theirs)
    differ = (at for at, (one, other) in enumerate(zip(text, their_text, strict=False)) if one != other)
    # A comparison of the whole comes first, since it is much faster.
    same = len(text) if text == their_text else next(differ, min(len(text), len(their_text)))
    shared = sorted(end for end in {*ends} & {*their_ends} if end <= same)
    last = shared[-1] if shared else -1
    spans, their_spans = ([bisect_left(shared, end) for end in side if end <= last] for side in (ends, their_ends))
    return spans, their_spans, same


@dataclass(frozen=True)
class Alignment:
    """A completion as a teacher with another tokenizer reads it."""

    teacher_ids: list[int]
    """Tokens of the teacher, at most up to the end of the last span."""
    spans: list[int]
    """The span of each token of the policy. The tokens after these are not compared."""
    teacher_spans: list[int]
    """The span of each token in `teacher_ids`."""
    fault: int | None = None
    """The first token of the policy that the teacher cannot write."""


class Aligner:
    """Reads completions with a teacher's tokenizer.

    A completion is compared up to its first token that the teacher cannot write: a special token, a byte that is not
    part of a character, or a byte that the teacher's tokenizer changes. If this is the token that ends the completion,
    it is compared with `end`, the teacher's token for this.
    """

    def __init__(self, own: Any, teacher: Any, end: int | None) -> None:
        self._own, self._theirs, self._teacher, self._end = TokenBytes(own), TokenBytes(teacher), teacher, end

    def __call__(self, token_ids: list[int], *, ended: bool, most: int) -> Alignment:
        """Return a completion's alignment. `ended`: it was not cut. `most`: number of tokens that the teacher reads."""
        own = list(_until_none(map(self._own, token_ids)))
        text, unfinished = _text(b"".join(own))
        read = encoded(self._teacher, text)[:most]
        theirs = list(_until_none(map(self._theirs, read)))
        spans, their_spans, same = aligned(own, theirs)
        ids, tokens = read[: len(their_spans)], len(token_ids)
        fault = bisect_right(list(accumulate(map(len, own))), same)
        if ended and fault == len(own) == tokens - 1:
            if self._end is not None and len(ids) < most:
                last = max(spans, default=-1) + 1
                ids, spans, their_spans = [*ids, self._end], [*spans, last], [*their_spans, last]
            return Alignment(ids, spans, their_spans)
        # What the teacher does not read to its end, or what was cut within a character, may be text.
        excused = len(read) == most or (unfinished and not ended and len(own) == tokens)
        return Alignment(ids, spans, their_spans, None if excused or fault == tokens else fault)


def spread(old_logp_T: Tensor, teacher_logp_U: Tensor, alignment: Alignment) -> tuple[Tensor, Tensor]:
    """Return the teacher's log-probabilities spread over the policy's tokens, and the size of each token's span, [T].

    The sum over a span is the teacher's log-probability of the span, and each of its tokens has the same difference
    from `old_logp`. A token that the teacher cannot write is a span with `NOT_TEXT`. Tokens that are not compared have
    `old_logp` and size 0. Computed in float64.

    Args:
        old_logp_T: the policy's log-probabilities.
        teacher_logp_U: the teacher's, of `alignment.teacher_ids`.
    """
    spans_t, spans_u = torch.tensor(alignment.spans), torch.tensor(alignment.teacher_spans)
    count, tokens = len({*alignment.spans}), len(alignment.spans)
    teacher_T, size_T = old_logp_T.double().clone(), torch.zeros(len(old_logp_T), dtype=torch.float64)
    if count:
        size_S, own_S, their_S = torch.zeros(3, count, dtype=torch.float64)
        size_S.index_add_(0, spans_t, torch.ones(tokens, dtype=torch.float64))
        own_S.index_add_(0, spans_t, teacher_T[:tokens])
        their_S.index_add_(0, spans_u, teacher_logp_U.double())
        teacher_T[:tokens] -= ((own_S - their_S) / size_S)[spans_t]
        size_T[:tokens] = size_S[spans_t]
    if alignment.fault is not None:
        teacher_T[alignment.fault], size_T[alignment.fault] = NOT_TEXT, 1
    return teacher_T, size_T


def check_spelling(tokenizer: Any, setting: str, *, text: str = _PROBE, keeps: bool = True) -> None:
    """Raise UserError if the tokens of a text are not known by their bytes, or (`keeps`) are not the text's bytes."""
    way = "take a model whose tokenizer is of bytes, or set teacher.other_tokenizer to false"
    refuse(
        not hasattr(tokenizer, "backend_tokenizer"),
        f"{setting} has no fast tokenizer, and teacher.other_tokenizer compares the bytes of tokens: {way}",
    )
    ids, of_token = encoded(tokenizer, text), TokenBytes(tokenizer)
    spelled = b"".join(of_token(token) or b"" for token in ids).decode(errors="replace")
    decoded = (
        text if keeps else str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    )
    refuse(
        spelled.strip(" ") != decoded.strip(" "),
        f"{setting}: its tokens of {decoded!r:.40} spell {spelled!r:.40}, so they cannot be aligned with others: {way}",
    )


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text that continues another; names of special tokens in it are ordinary text."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    # Some tokenizers put a space before the first text.
    line, both = ids("\n"), ids(f"\n{text}")
    return both[len(line) :] if both[: len(line)] == line else ids(text)


def _until_none(pieces: Any) -> Any:
    return takewhile(lambda piece: piece is not None, pieces)


def _text(data: bytes) -> tuple[str, bool]:
    """Return the text of bytes up to the first that is not part of a character, and whether it begins one that only
    lacks its end."""
    try:
        return data.decode(), False
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), error.reason == "unexpected end of data"
