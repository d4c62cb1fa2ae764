"""Appends the initial observations of environments to their prompts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hybrid_grpo.config import DataConfig
from hybrid_grpo.data.chat_template import clean, prompt_text_of
from hybrid_grpo.data.completion import Message, Prompt
from hybrid_grpo.data.episodes import PLACE, Opening
from hybrid_grpo.data.pictures import ImageStore, parted, placed
from hybrid_grpo.data.prompts import read_prompt
from hybrid_grpo.turns.environments.environments import Environments
from hybrid_grpo.turns.template import cut
from hybrid_grpo.turns.tools.tools import Tools


class Openings:
    """Resets the environments of prompts, once for all completions of a prompt, and appends their initial observations.

    Args:
        data: how prompts become tokens.
        tokens: maximum number of tokens of an observation; the rest is cut.
        album: has the pictures of prompts; None if the model sees none.
    """

    def __init__(
        self, environments: Environments, tools: Tools | None, data: DataConfig, tokenizer: Any, tokens: int,
        album: ImageStore | None = None,
    ) -> None:  # fmt: skip
        self._album, self._environments = album, environments
        self._tools, self._tokenizer, self._tokens = tools, tokenizer, tokens
        self._data = replace(
            data,
            prompt_column="prompt",
            system_prompt=None,  # the texts of prompts already contain it
            chat_template="always",
            max_prompt_tokens=2**40,  # no limit: prompts that are too long were left out when they were read
        )

    def opened(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Prompt]:
        """Return the prompts with their initial observations. Waits until all environments have been reset."""
        openings = self._environments.openings(prompts, seeds)
        return [self._written(prompt, opening) for prompt, opening in zip(prompts, openings, strict=True)]

    def _written(self, prompt: Prompt, opening: Opening) -> Prompt:
        prompt = replace(prompt, opening=opening)
        said = opening.observation
        if said is None and len(self._environments.kinds) == 1:
            return prompt
        where = f"the prompt of row {prompt.id} (from 0) with the initial observation of its environment"
        text, pictures = prompt.text, list(prompt.pictures)
        if said and said.pictures:
            assert self._album is not None
            text = placed(text, len(pictures)) if pictures else text
            pictures += self._album.read(said.pictures, None, where, self._data, keep=False)
        if said and said.text:
            cut_off = partial(cut, self._tokenizer, prompt_text_of(self._tokenizer), tokens=self._tokens)
            text = _extended(text, [cut_off(clean(piece)) for piece in said.text.split(PLACE)])
        # If there are several environments, a prompt describes only its own.
        schemas = self._tools.schemas_of(self._environments.kind(prompt)) if self._tools is not None else []
        tools = {"tools": schemas} if schemas else {}
        data = replace(self._data, chat_template_kwargs=self._data.chat_template_kwargs | tools)
        seen = None if self._album is None else (self._album, None)
        row = {"prompt": text, data.image_column: pictures}
        ids = read_prompt(0, row, where, data, self._tokenizer, seen).token_ids
        return replace(prompt, text=text, token_ids=ids, pictures=tuple(pictures))


def _extended(text: str | list[Message], pieces: Sequence[str]) -> str | list[Message]:
    """Return a prompt with texts at the end of its last message, and places for pictures between them."""
    if isinstance(text, str):
        if len(pieces) == 1:
            return text + pieces[0]
        text = [{"role": "user", "content": text}]
    content = text[-1]["content"]
    if isinstance(content, str) and len(pieces) == 1:
        longer: Any = content + pieces[0]
    else:
        before = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        longer = [*before, *parted(pieces)]
    return [*text[:-1], {**text[-1], "content": longer}]
