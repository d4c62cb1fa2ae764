"""Tokenizers that spell any text, trained on the spot: byte-level ones, and one like SentencePiece's."""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def trained(
    texts: Sequence[str], parts: Any, decoder: Any, alphabet: Sequence[str] = (), normalizer: Any = None,
    merges: int = 60, **options: Any,
) -> PreTrainedTokenizerFast:  # fmt: skip
    """A tokenizer of what is frequent in some texts, and of bytes: as its alphabet, or as tokens for other letters."""
    fallback = [] if alphabet else BYTES
    backend = Tokenizer(models.BPE(byte_fallback=bool(fallback)))
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, parts, decoder
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(fallback) + merges,
        initial_alphabet=list(alphabet),
        special_tokens=["<eos>", *fallback],
        show_progress=False,
    )
    backend.train_from_iterator([*texts] * 20, trainer)
    state = json.loads(backend.to_str())
    # The bytes are text.
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] == "<eos>"]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<eos>", **options)


def byte_level(texts: Sequence[str], merges: int = 60, **options: Any) -> PreTrainedTokenizerFast:
    """As GPT-2 and most others."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(texts, level, decoders.ByteLevel(), alphabet, merges=merges, **options)


def sentencepiece(texts: Sequence[str], merges: int = 60) -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral: a space before the text, which decoding takes away; other characters as bytes."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return trained(texts, None, decoders.Sequence(steps), normalizer=spaces, merges=merges)
