"""Where a completion's text ends it: stop strings, which no single token need be."""

from __future__ import annotations

from collections.abc import Callable

from hybrid_grpo.generation.sampler import Sampling


def text_ends(token_ids: list[int], sampling: Sampling, decode: Callable[[list[int]], str] | None) -> bool:
    """Whether the last token completes a stop string.

    Only the end of the text is looked at: a character takes four tokens at most, those of its bytes in UTF-8.

    Args:
        token_ids: the completion so far.
        sampling: with the strings, which are passed over before `min_tokens`.
        decode: tokens to text; needed where there are strings.
    """
    if not sampling.stop_strings or len(token_ids) < sampling.min_tokens:
        return False
    assert decode is not None, "stop strings need `decode`"
    tail = token_ids[-4 - 4 * max(map(len, sampling.stop_strings)) :]
    text = decode(tail)
    # One that was passed over still stands there, and ends nothing later on either.
    before = decode(tail[:-1]) if sampling.min_tokens else ""
    return any(text.rfind(string) > before.rfind(string) for string in sampling.stop_strings)
