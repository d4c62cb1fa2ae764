"""Whether a turn ends with a stop string."""

import functools
from collections.abc import Callable

from hybrid_grpo.generation.sampler import Sampling


@functools.lru_cache(maxsize=1 << 17)
def _may_end(token: int, lasts: str, decode: Callable[[list[int]], str]) -> bool:
    """Whether the text of a token may contain one of `lasts`, the last characters of stop strings. Only this token is
    decoded, since decoding every row at every step would take longer than the rest of the step.

    Decoded alone, a token may lack spaces that it has after other tokens, and an incomplete character becomes U+FFFD.
    """
    text = decode([token])
    return "\ufffd" in text or any(last in text or last.isspace() for last in lasts)


def text_ends(
    token_ids: list[int], sampling: Sampling, decode: Callable[[list[int]], str] | None, earlier: int = 0
) -> bool:
    """Whether the last token of a turn completes a stop string.

    Only the end of the text is decoded: a character takes at most four tokens, one for each of its UTF-8 bytes.
    `token_ids` are the tokens of the turn so far; previous turns had `earlier` tokens. Stop strings require `decode`.
    """
    if not sampling.stop_strings or earlier + len(token_ids) < sampling.min_tokens:
        return False
    assert decode is not None, "stop strings need `decode`"
    if not _may_end(token_ids[-1], "".join(string[-1] for string in sampling.stop_strings), decode):
        return False
    tail = token_ids[-4 - 4 * max(map(len, sampling.stop_strings)) :]
    text = decode(tail)
    # A string that was ignored before `min_tokens` is still in the text, and must not end it later either.
    before = decode(tail[:-1]) if sampling.min_tokens else ""
    return any(text.rfind(string) > before.rfind(string) for string in sampling.stop_strings)
