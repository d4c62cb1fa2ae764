"""Tokenizes a prompt with an answer for a reward model, in the same way when it is trained and when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybrid_grpo.data.chat_template import formed, joined, text_ids
from hybrid_grpo.data.completion import Message
from hybrid_grpo.data.picture import Picture

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid_grpo.data.pictures import ImageStore

TOKEN_KINDS = {"token_type_ids", "mm_token_type_ids"}
"""What processors return with one value per token, beside the tokens themselves."""


def chat_tokens(tokenizer: Any, prompt: str | list[Message], answer: str) -> list[int]:
    """Return the tokens of prompt and answer as a chat, including the special tokens of the chat template. A text
    prompt becomes a user message, and the answer an assistant message."""
    chat = formed(tokenizer, _chat(prompt, answer))
    return list(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False))


def _chat(prompt: str | list[Message], answer: str) -> list[Message]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[-1]["role"] == "assistant":
        messages, answer = messages[:-1], f"{messages[-1]['content']}{answer}"
    return [*messages, {"role": "assistant", "content": answer}]


def seen_chat(
    album: ImageStore, prompt: str | list[Message], answer: str, pictures: Sequence[Picture]
) -> dict[str, Tensor]:
    """Return what the processor of an album makes of prompt and answer as a chat, with the prompt's pictures in their
    places; see `placed` and `ImageStore.seen`. Names of control tokens in texts are not marked."""
    from hybrid_grpo.data.pictures import placed

    chat = placed(_chat(prompt, answer), len(pictures))
    text = album.processor.tokenizer.apply_chat_template(chat, tokenize=False, chat_template=album.template)
    return album.seen(text, [picture.open() for picture in pictures])


def text_tokens(tokenizer: Any, prompt: str | list[Message], answer: str) -> list[int]:
    """Return the tokens of prompt and answer as one text. The tokenizer's special tokens are added unless the text
    already has them. Each message of a chat prompt becomes a line."""
    contents = [] if isinstance(prompt, str) else [message["content"] for message in prompt]
    lines = [f"{joined(content) if isinstance(content, list) else content}\n" for content in contents]
    return text_ids(tokenizer, "".join([prompt] if isinstance(prompt, str) else lines) + answer, ended=True)
