"""Turns rows into prompts: columns, system message, chat template and length limit.

`sources` reads the rows, and `loader` decides the order of the prompts.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.data.chat_template import apply_template, prompt_text_of, text_ids
from hybrid_grpo.data.completion import Message, Prompt
from hybrid_grpo.data.picture import Picture
from hybrid_grpo.data.pictures import ImageStore, given_pictures, has_images, placed
from hybrid_grpo.data.row_shapes import way_out
from hybrid_grpo.data.sources import Row, Source, mixture_source, read_rows, training_source
from hybrid_grpo.distributed.ranks import all_gather_objects, shared_out, world_size
from hybrid_grpo.model.fingerprints import of_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_LETTERS_OF_A_TOKEN = 256
_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags around the assistant's text, which transformers adds to the syntax of jinja."""
TRUSTED = ("system", "developer", "assistant")
"""Roles whose messages may contain control tokens. In other messages, names of control tokens are treated as text."""
_PUNCTUATION = re.compile(r"""[\s.,;:!?"'`\u2018-\u201f\u2026\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f]+""")
_GIVEN_TO_TEMPLATES = {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}


def read_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, source: Source | None = None,
    album: ImageStore | None = None,
) -> tuple[list[Prompt], str]:  # fmt: skip
    """Return the prompts of a source (default: the training rows), and a line on what was read and dropped. `album`
    takes their pictures. Collective: each rank tokenizes its share. Raises UserError."""
    if source is None and config.mixture:
        return _read_mixture(config, tokenizer, album)
    source = source or training_source(config)
    rows = read_rows(source, config)
    kept = prompts_of(rows, source, config, tokenizer, album)
    return kept, data_line(source, rows, kept)


def _read_mixture(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, album: ImageStore | None
) -> tuple[list[Prompt], str]:
    """Return the prompts of all sources, one source after the other, and a line on what was read. Rows are numbered
    across sources and get the columns of all sources, with None for missing values. The column data_source contains the
    name of the source, unless the rows already have this column."""
    prompts: list[Prompt] = []
    lines, start = [], 0
    for of_mixture in config.mixture:
        source, name = mixture_source(of_mixture), of_mixture.name
        rows = read_rows(source, config)
        kept = prompts_of(rows, source, config, tokenizer, album)
        lines.append(f"{name} (weight {of_mixture.weight:g}) is {data_line(source, rows, kept)}")
        prompts += [replace(p, id=start + p.id, source=name, columns={"data_source": name, **p.columns}) for p in kept]
        start += len(rows)
    columns = dict.fromkeys(column for prompt in prompts for column in prompt.columns)
    return [replace(p, columns={**dict.fromkeys(columns), **p.columns}) for p in prompts], " | ".join(lines)


def data_line(source: Source, rows: list[Row], kept: list[Prompt], over_long_completions: int = 0) -> str:
    """Return a line that describes what was read and dropped. `kept` must not be empty."""
    lengths = [len(prompt.token_ids) for prompt in kept]
    dropped = {"prompt": len(rows) - len(kept) - over_long_completions, "completion": over_long_completions}
    why = "".join(f", {count} dropped for an over-long {what}" for what, count in dropped.items() if count)
    begun = sum(begins_answer(prompt) for prompt in kept)
    why += f", {begun} with the beginning of an answer, which is continued" if begun else ""
    return (
        f"{source}: {len(kept)} of {len(rows)} rows kept{why};"
        f" prompts of {min(lengths)} to {max(lengths)} tokens (mean {sum(lengths) / len(lengths):.1f});"
        f" columns {', '.join(rows[0])}"
    )


def begins_answer(prompt: Prompt) -> bool:
    """Whether a prompt ends with a message of the assistant, which the completion continues."""
    return isinstance(prompt.text, list) and prompt.text[-1]["role"] == "assistant"


def require_column(setting: str, column: str, rows: list[Row], source: Source) -> None:
    """Raise UserError if the rows do not have a column, and suggest one that they have."""
    if column not in rows[0]:
        raise UserError(f"{setting} {column}: {source} has no such column: {way_out(setting, column, rows[0])}")


def prompts_of(
    rows: list[Row], source: Source, config: DataConfig, tokenizer: PreTrainedTokenizerBase,
    album: ImageStore | None = None,
) -> list[Prompt]:  # fmt: skip
    """Return the prompts of the rows, numbered by row, without prompts longer than `max_prompt_tokens`. `album` takes
    the pictures; without one there may be none. Collective: each rank reads its share. Raises UserError if there is no
    prompt column, a row is not a prompt, a required chat template is missing, or all prompts are too long (with
    `over_long: refuse`, if any prompt is)."""
    require_column("data.prompt_column", config.prompt_column, rows, source)
    refuse(
        config.system_prompt is not None and config.chat_template == "never",
        "data.system_prompt needs a chat template, and data.chat_template is never: remove one of them",
    )
    if config.chat_template_kwargs:
        check_template_kwargs(config.chat_template_kwargs, tokenizer)
    prompts = _read_all(rows, source, config, tokenizer, album)
    templated = config.chat_template == "always" or any(
        isinstance(prompt.text, list) or prompt.columns.get(config.image_column) for prompt in prompts
    )
    refuse(
        bool(config.chat_template_kwargs) and not templated,
        f"data.chat_template_kwargs {config.chat_template_kwargs}: no prompt of {source} is a chat, so no template is"
        " applied: set data.chat_template to always, or remove data.chat_template_kwargs",
    )
    limit = config.max_prompt_tokens
    over_long = [prompt for prompt in prompts if len(prompt.token_ids) > limit]
    if over_long and config.over_long == "refuse":
        raise UserError(
            f"data.max_prompt_tokens {limit}: the prompt of row {over_long[0].id} (from 0) of {source} has"
            f" {len(over_long[0].token_ids)} tokens, one of {len(over_long)} over-long ones: raise the limit, or set"
            " data.over_long to drop"
        )
    shortest = min(len(prompt.token_ids) for prompt in prompts)
    refuse(
        shortest > limit,
        f"data.max_prompt_tokens {limit}: all {len(prompts)} prompts of {source} are longer, the shortest has"
        f" {shortest} tokens: raise the limit",
    )
    return [prompt for prompt in prompts if len(prompt.token_ids) <= limit]


def _read_all(
    rows: list[Row], source: Source, config: DataConfig, tokenizer: PreTrainedTokenizerBase, album: ImageStore | None
) -> list[Prompt]:
    seen = None if album is None else (album, source.folder)

    def read(number: int) -> Prompt:
        return read_prompt(number, rows[number], f"row {number} (from 0) of {source}", config, tokenizer, seen)

    def shows(row: Row) -> bool:
        return bool(row.get(config.image_column)) or has_images(row[config.prompt_column])

    if album is not None and tokenizer.chat_template is None and any(map(shows, rows)):
        # Other rows, perhaps in another rank's share, may need the processor's template too.
        tokenizer.chat_template = album.template
    texts = (json.dumps(row[config.prompt_column], default=lambda v: type(v).__name__, skipkeys=True) for row in rows)
    refuse(
        len(set(all_gather_objects((len(rows), of_texts(texts) if world_size() > 1 else "")))) > 1,
        f"{source}: not all ranks read the same prompts: give every machine the same data",
    )
    # Columns, which every rank has, are not sent.
    prompts = shared_out(lambda number: replace(read(number), columns={}), len(rows))
    prompts = [replace(prompt, columns=_columns(rows[prompt.id], prompt.pictures, config)) for prompt in prompts]
    if album is not None:
        album.take(picture for prompt in prompts for picture in prompt.pictures)
    return prompts


def _columns(row: Row, pictures: Sequence[Picture], config: DataConfig) -> Row:
    """Return the columns of a row beside its prompt, with pictures as they were read."""
    others = {name: value for name, value in row.items() if name != config.prompt_column}
    return {**others, config.image_column: list(pictures)} if pictures else others


def prompt_text(row: Row, where: str, config: DataConfig) -> str | list[Message]:
    """Return the prompt of a row as reward functions receive it. Raises UserError if it is neither text nor a chat, or
    contradicts the settings; `where` describes the row in messages."""
    value = row[config.prompt_column]
    text = value if isinstance(value, str) else _messages(value, where, config)
    if config.system_prompt is None:
        return text
    chat = placed(text, 0)
    refuse(
        chat[0]["role"] == "system",
        f"data.system_prompt is set, and {where} has a system message of its own: leave one out",
    )
    return [{"role": "system", "content": config.system_prompt}, *chat]


def read_prompt(
    number: int, row: Row, where: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase,
    seen: tuple[ImageStore, Path | None] | None = None,
) -> Prompt:  # fmt: skip
    """Return the tokenized prompt of a row. A prompt that is far too long is cut, but remains longer than the limit.
    Raises UserError as `prompts_of` does; `where` describes the row in messages. `seen` is what takes its pictures, and
    the folder that their paths are relative to."""
    text, values = given_pictures(prompt_text(row, where, config), row.get(config.image_column) if seen else None)
    refuse(
        seen is None and has_images(text),
        f"{where} has a picture, and prompts have none here: take a policy.model that sees",
    )
    pictures: list[Picture] = []
    tokenize: Callable[..., list[int]] = partial(_tokenized, where=where, config=config)
    if seen and (values or has_images(text)):
        pictures = seen[0].read(values, seen[1], where, config)
        tokenize = partial(seen[0].ids, pictures=pictures, where=where)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = seen[0].template
    if isinstance(text, list) or config.chat_template == "always" or (pictures and config.chat_template == "auto"):
        untrusted, chat = prompt_text_of(tokenizer), placed(text, len(pictures))
        chat = [m if m["role"] in TRUSTED else {**m, "content": untrusted.marked(m["content"])} for m in chat]
        token_ids = tokenize(_apply_template(chat, where, config, tokenizer), encode=untrusted.ids)
    else:
        token_ids = tokenize(text, encode=partial(text_ids, tokenizer))
    if not token_ids:
        if tokenizer.bos_token_id is None:
            raise UserError(
                f"data.prompt_column {config.prompt_column}: {where} is an empty prompt, and the tokenizer has no"
                " beginning-of-sequence token to start from: remove the row"
            )
        token_ids = [tokenizer.bos_token_id]
    return Prompt(number, text, token_ids, _columns(row, pictures, config), pictures=tuple(pictures))


def _tokenized(text: str, encode: Callable[[str], list[int]], where: str, config: DataConfig) -> list[int]:
    # Tokens do not have this many letters, but some tokenizers merge spaces: if the start fits, read the whole text.
    start = text[: (config.max_prompt_tokens + 1) * _LETTERS_OF_A_TOKEN]
    try:
        token_ids = encode(start)
        if len(start) < len(text) and len(token_ids) <= config.max_prompt_tokens:
            token_ids = encode(text)
    except TypeError as error:
        # Tokenizers raise this for text that is not valid Unicode, with half of a surrogate pair.
        raise UserError(f"data.prompt_column {config.prompt_column}: {where} cannot be tokenized: {error}") from error
    return token_ids


def _messages(value: Any, where: str, config: DataConfig) -> list[Message]:
    column = f"data.prompt_column {config.prompt_column}"
    shown = f"{column}: {where} has {value!r:.40}"
    refuse(not isinstance(value, list), f"{shown}: give text or a list of chat messages")
    is_chat = bool(value) and all(map(_is_message, value))
    refuse(not is_chat, f"{shown}: give messages {{role: ..., content: ...}}, at least one")
    last = value[-1]
    refuse(
        last["role"] == "assistant" and (not last.get("content") or bool(last.get("tool_calls"))),
        f"{column}: {where} ends with a message of the assistant without text to continue: end it with the user's",
    )
    refuse(
        config.chat_template == "never",
        f"data.chat_template never: {where} has chat messages: set it to auto, or take a data.prompt_column with text",
    )
    # Arrow gives every message the keys of all messages, with value None, which templates would treat as set.
    return [{key: part for key, part in message.items() if part is not None or key == "content"} for message in value]


def _is_message(value: Any) -> bool:
    """Whether `value` has a role, and content that is text or a list of parts; assistant messages may lack content."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list) or value["role"] == "assistant"


def check_template_kwargs(kwargs: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for variables that the template does not read, or that it always receives."""
    from jinja2 import Environment, TemplateError, meta

    if tokenizer.chat_template is None:
        return  # refused where a prompt needs one
    template = _GENERATION_TAG.sub("", str(tokenizer.get_chat_template()))
    try:
        syntax = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateError:
        return  # reported where the template is applied
    known = meta.find_undeclared_variables(syntax) - _GIVEN_TO_TEMPLATES - set(tokenizer.special_tokens_map)
    for name in kwargs:
        refuse(
            name not in known,
            f"data.chat_template_kwargs {name}: the tokenizer's chat template reads no such variable:"
            f" {did_you_mean(name, sorted(known))}",
        )


def _apply_template(chat: list[Message], where: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise UserError(
            f"data.chat_template: {where} is a chat, and the tokenizer of policy.model has no chat template: take a"
            " chat model, or give text prompts with data.chat_template auto and no data.system_prompt"
        )
    try:
        return apply_template(tokenizer, chat, **config.chat_template_kwargs)
    except Exception as error:  # a template is a program of the model's authors
        why = error if isinstance(error, TemplateError | ValueError) else f"{type(error).__name__} {error}"
        if "continue_final_message" in str(error):
            why = "it does not write the assistant's last message, which is continued, as it is: end with the user's"
        raise UserError(f"data.chat_template: the tokenizer's template refuses {where}: {why}") from error


def count_equal(training: Iterable[Prompt], held_out: Iterable[Prompt]) -> int:
    """Return how many held-out prompts are also training prompts, ignoring punctuation, case and white space. Of those
    with pictures, the pictures must be the same."""

    def compared(prompt: Prompt) -> tuple[str, tuple[int, ...]]:
        return _plain_text(prompt.text), tuple(picture.key for picture in prompt.pictures)

    trained = set(map(compared, training))
    return sum(compared(prompt) in trained for prompt in held_out)


def _plain_text(prompt: str | list[Message]) -> str:
    """Return the text of a prompt, one message after the other, without system messages, which many prompts share, and
    without punctuation, with case folded and letters composed. Other symbols are kept: (2 + 3) * 4 is not 2 + 3 * 4."""
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    contents = [message.get("content") or "" for message in chat if message["role"] != "system"]
    parts = [part for one in contents for part in (one if isinstance(one, list) else [{"text": one}])]
    text = "\n".join(str(part.get("text", "")) for part in parts)
    return _PUNCTUATION.sub(" ", unicodedata.normalize("NFC", text).casefold()).strip()
