"""Text while its tokens come."""

import pytest
from byte_tokenizers import byte_level
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hybrid_grpo.commands.conversation import TextStream

BYTES = byte_level([], merges=0).backend_tokenizer
"""A token for every byte of UTF-8, as in the vocabularies of GPT-2, Llama 3 and Qwen for rare characters."""
TEXT = "naïve 日本 👩‍🚀 \N{REPLACEMENT CHARACTER} und Schluß"


def of_words() -> Tokenizer:
    """Words with a mark for the space before them, which is dropped at the start of a text, as in Llama 2."""
    words = sorted({f"▁{word}" for word in TEXT.split()})
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@pytest.mark.parametrize("tokenizer", [BYTES, of_words()])
def test_the_parts_are_whole_characters_and_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer.decode)
    tokens = tokenizer.encode(TEXT).ids
    parts = [stream.add(token) for token in tokens]
    assert "".join(parts) == TEXT and stream.tokens == tokens
    assert max(map(len, parts)) <= max(map(len, TEXT.split())) + 1, "text is given out as it comes"


def test_bytes_that_are_no_character_come_when_it_is_clear_that_they_are_none() -> None:
    tokenizer = BYTES
    rocket = tokenizer.encode("🚀").ids
    stream = TextStream(tokenizer.decode)
    parts = [stream.add(token) for token in [*rocket[:2], *tokenizer.encode("a").ids, *rocket[:3]]]
    assert parts[:2] == ["", ""] and parts[2].endswith("a") and parts[3:] == ["", "", ""]
    assert "".join(parts) == stream.text == tokenizer.decode(stream.tokens).rstrip("\N{REPLACEMENT CHARACTER}")
