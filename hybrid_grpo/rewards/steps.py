"""Steps given as pieces of a completion's text: at which token each of them ends."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from hybrid_grpo.data.batch import Completion, Step
from hybrid_grpo.rewards.functions import Piece

_UNFINISHED = "\ufffd"
"""What tokens decode to that end within a character."""


class TokenEnds:
    """Where in a text its tokens end.

    Args:
        tokenizer: that the tokens are of.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Decoders leave out a space at the beginning of a text, so tokens are read behind another one.
        self._anchor = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        self._texts: dict[tuple[bool, tuple[int, ...]], str] = {}

    def __call__(self, token_ids: list[int], text: str) -> list[int]:
        """[T], for every token the number of characters of the text up to and with its last one.

        A character that is made of several tokens is of the last of them. What special tokens say is not in the text.

        Args:
            token_ids: [T]
            text: what they decode to.
        """
        lengths: list[int] = []
        run: list[int] = []
        for number, token in enumerate(token_ids, 1):
            run.append(token)
            piece = self._text(len(run) == number, tuple(run))
            # Behind as many bytes as a character can have, it is no beginning of one.
            finished = not piece.endswith(_UNFINISHED) or len(run) == 4
            lengths.append(len(piece) if finished else 0)
            run = [] if finished else run
        ends = list(accumulate(lengths))
        if ends[-1:] == [len(text)]:
            return ends
        # A tokenizer whose texts do not add up.
        return [min(len(self._decode(token_ids[: k + 1])), len(text)) for k in range(len(token_ids))]

    def _text(self, first: bool, token_ids: tuple[int, ...]) -> str:
        """Of tokens at the beginning of a text, or within one."""
        if (first, token_ids) not in self._texts:
            anchor = [] if first else self._anchor
            self._texts[first, token_ids] = self._decode([*anchor, *token_ids])[len(self._decode(anchor)) :]
        return self._texts[first, token_ids]

    def _decode(self, token_ids: list[int]) -> str:
        # Rollouts that were saved may lack tokens: they stand there as -1.
        return str(self._tokenizer.decode([t for t in token_ids if t >= 0], skip_special_tokens=True))


def token_steps(pieces: list[Piece], completion: Completion, token_ends: TokenEnds | None) -> list[Step]:
    """The same steps by their ends in tokens: a piece ends with the token that its last character is of.

    Pieces that end with the same token are added up, and empty ones belong to what is before them. Without a tokenizer
    all of them end with the completion.

    Raises:
        ValueError: the pieces are not what the text begins with; it says where they leave it.
    """
    text, at = completion.text, 0
    rewards: dict[int, float] = {}
    ends = [] if token_ends is None else token_ends(completion.token_ids, text)
    token = 0
    for piece, reward in pieces:
        if not text.startswith(piece, at):
            raise ValueError(f"piece {piece!r:.40} is not what stands at character {at} of the completion")
        at += len(piece)
        while token < len(ends) - 1 and ends[token] < at:
            token += 1
        end = token + 1 if ends else len(completion.token_ids)
        rewards[end] = rewards.get(end, 0.0) + reward
    return sorted(rewards.items())
