"""Pictures in prompts: where they stand, and how a model's processor takes them.

`ImageStore` holds all pictures of a process (`picture.py`) by their keys, which follow from their contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

from hybrid_grpo.config import DataConfig, PolicyConfig
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.data.chat_template import unmarked
from hybrid_grpo.data.completion import Message
from hybrid_grpo.data.picture import Picture, read_picture
from hybrid_grpo.model.sight import VisionEncoder, image_token, load_processor, load_tower
from hybrid_grpo.model.towers import has_tower
from hybrid_grpo.model.visual_tokens import visual_tokens

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

_BLANK = 32
"""Pixels of each side of a blank picture."""
_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


_SIGN = "<image>"
"""How the texts of many data sets mark the place of a picture."""


def given_pictures(text: str | list[Message], column: Any) -> tuple[str | list[Message], list[Any]]:
    """Return a prompt whose parts of type image have no content, and what a row gives as pictures, in order: the
    contents of these parts, or else those of the row's column."""
    several = isinstance(column, Sequence) and not isinstance(column, str | bytes)
    found = [] if column is None else list(column) if several else [column]
    if isinstance(text, str):
        return text, found
    pairs = list(map(bared, text))
    return [message for message, _ in pairs], [value for _, inside in pairs for value in inside] or found


def bared(message: Message) -> tuple[Message, list[Any]]:
    """Return a message whose parts of type image have no content, and their contents in order."""
    inside: list[Any] = []

    def bare(part: Any) -> Any:
        if not isinstance(part, dict) or part.get("type") not in ("image", "image_url"):
            return part
        value = next((part[name] for name in ("image", "path", "bytes", "url", "image_url") if part.get(name)), None)
        if value is not None:
            inside.append(value["url"] if isinstance(value, dict) and "url" in value else value)
        return {"type": "image"}

    content = message.get("content")
    return ({**message, "content": list(map(bare, content))} if isinstance(content, list) else message), inside


def placed(text: str | list[Message], count: int) -> list[Message]:
    """Return a prompt as a chat with `count` parts of type image: those that it has; else one in the place of each
    `<image>`, if there are as many; else all of them before the user's first text."""
    chat = [{"role": "user", "content": text}] if isinstance(text, str) else text
    if has_images(chat) or not count:
        return chat
    of_user = {id(m): m["content"] for m in chat if m["role"] == "user" and isinstance(m.get("content"), str)}
    if sum(content.count(_SIGN) for content in of_user.values()) == count:
        return [{**m, "content": parted(of_user[id(m)].split(_SIGN))} if id(m) in of_user else m for m in chat]
    first = next((number for number, m in enumerate(chat) if m["role"] == "user"), len(chat) - 1)
    content = chat[first].get("content")
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    return [*chat[:first], {**chat[first], "content": [{"type": "image"}] * count + texts}, *chat[first + 1 :]]


def filled(chat: list[Message], parts: Iterable[dict[str, Any]]) -> list[Message]:
    """Return a chat with these parts in the places of its pictures, in order."""
    left, bare = iter(parts), {"type": "image"}
    of = {id(m): [next(left) if part == bare else part for part in m["content"]] for m in chat if has_images(m)}
    return [{**m, "content": of[id(m)]} if id(m) in of else m for m in chat]


def has_images(text: str | list[Message] | Message) -> bool:
    """Whether a prompt or a message has a part of type image."""
    if isinstance(text, list):
        return any(map(has_images, text))
    content = text.get("content") if isinstance(text, dict) else None
    return isinstance(content, list) and any(isinstance(p, dict) and p.get("type") == "image" for p in content)


def parted(pieces: Iterable[str], images: Iterable[dict[str, Any]] = repeat({"type": "image"})) -> list[dict[str, Any]]:
    """Return a content of texts, without empty ones, with a part of `images` between each two."""
    first, *others = ([{"type": "text", "text": piece}] if piece else [] for piece in pieces)
    return [*first, *(part for image, text in zip(images, others, strict=False) for part in (image, *text))]


@dataclass(frozen=True)
class _Layout:
    """How pictures of some size stand in a prompt."""

    text: str
    """What takes the place of the processor's token for a picture."""
    count: int
    """Number of embeddings."""


class ImageStore:
    """The pictures of a process, and the processor of the model that sees them, which `load` returns for the first one.
    `token` is the one in whose places embeddings stand (see `image_token`); None if it is not known."""

    keeps = True
    """Whether pictures stay here although no prompt has them any more."""
    empty = True
    """Whether there has been no picture yet."""

    def __init__(self, load: Callable[[], Any], token: int | None) -> None:
        self._load, self._token = load, token
        self._pictures: dict[int, list[ref[Picture]]] = {}
        """By key. Prompts that show one picture may have different objects of it, of which any may go first."""
        self._kept: list[Picture] = []
        self._largest = (0, 0)
        self._layouts: dict[tuple[int, int], _Layout] = {}

    @classmethod
    def of(cls, name: str, config: Any) -> ImageStore | None:
        """Return an empty album for a model (folder or hub name) with this configuration; None if it sees nothing."""
        return cls(partial(load_processor, name), image_token(config)) if has_tower(config) else None

    @cached_property
    def processor(self) -> Any:
        return self._load()

    @property
    def template(self) -> str | None:
        """The processor's chat template."""
        template = self.processor.chat_template or self.processor.tokenizer.chat_template
        return template if isinstance(template, str) or template is None else template.get("default")

    def read(
        self, values: Sequence[Any], folder: Path | None, where: str, config: DataConfig, keep: bool = True
    ) -> list[Picture]:
        """Return the pictures of a row, and take them into the album; see `read_picture` and `take`."""
        refuse(
            len(values) > config.max_images,
            f"data.max_images {config.max_images}: {where} has {len(values)} pictures: raise it, or remove the row",
        )
        self.check(where)
        found = [read_picture(value, folder, where, config.max_pixels) for value in values]
        self.take(found, keep)
        return found

    def check(self, where: str) -> None:
        """Raise UserError if no pictures can be taken; `where` describes what has some."""
        # Loaded first, since it is refused where pillow is not installed.
        kind = type(self.processor).__name__
        refuse(
            self._token is None,
            f"{where} has pictures, and policy.model names no token for their places ({kind}): take another model",
        )

    def take(self, pictures: Iterable[Picture], keep: bool = True) -> None:
        """Take pictures that some rank has read. Those that are not to be kept are forgotten with their prompts."""
        for picture in pictures:
            known = [found for one in self._pictures.get(picture.key, ()) if (found := one()) is not None]
            assert all(one.size == picture.size for one in known), "two pictures have the same key"
            self._largest = max(self._largest, picture.size, key=prod)
            self.empty = False
            if any(one is picture for one in known):
                continue
            self._pictures.setdefault(picture.key, []).append(ref(picture, partial(self._gone, picture.key)))
            if keep and self.keeps and not known:
                self._kept.append(picture)

    def _gone(self, key: int, one: ref[Picture]) -> None:
        self._pictures[key].remove(one)
        if not self._pictures[key]:
            del self._pictures[key]

    def pixels(self, key: int) -> dict[str, Any]:
        """Return what the model's tower takes of a picture, as tensors."""
        [picture, *_] = filter(None, (one() for one in self._pictures[key]))
        return self._tensors(picture.open())

    @property
    def largest(self) -> dict[str, Any]:
        """What the model's tower takes of a blank picture of the largest size in the album."""
        from PIL import Image

        return self._tensors(Image.new("RGB", max(self._largest, (_BLANK, _BLANK), key=prod)))

    @property
    def blank_image(self) -> Image:
        """A small blank picture."""
        from PIL import Image

        return Image.new("RGB", (_BLANK, _BLANK))

    def seen(self, text: str, images: list[Image]) -> dict[str, Any]:
        """Return what the processor makes of a text and its pictures: `input_ids`, [1, S], and what the tower takes."""
        found = dict(self.processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt"))
        return {name: value for name, value in found.items() if name != "attention_mask"}

    def _tensors(self, image: Image) -> dict[str, Any]:
        found = self.processor(images=[image], return_tensors="pt")
        return {name: value for name, value in found.items() if name not in _TEXT_INPUTS}

    def ids(self, text: str, pictures: Sequence[Picture], encode: Callable[[str], list[int]], where: str) -> list[int]:
        """Return the tokens of a rendered prompt, with visual tokens in the places of its pictures. The processor's
        text for each picture is put into the prompt before it is tokenized, as the processor does it, since tokens may
        reach across its ends."""
        name = self.processor.image_token
        parts = unmarked(name).split(text)
        refuse(
            len(parts) - 1 != len(pictures),
            f"{where} has {len(pictures)} pictures, and its prompt {len(parts) - 1} places for them: give as many parts"
            " {type: image}, or none, as there are pictures",
        )
        layouts = [self._layout(picture.size) for picture in pictures]
        ids = encode("".join([parts[0], *(of.text + part for of, part in zip(layouts, parts[1:], strict=True))]))
        shown = zip(pictures, layouts, strict=True)
        visual = iter([token for picture, of in shown for token in visual_tokens(picture.key, of.count)])
        try:
            ids = [next(visual) if token == self._token else token for token in ids]
        except StopIteration:
            raise UserError(f"{where}: its text has the token of a picture, {name}: remove it") from None
        assert next(visual, None) is None, "a picture has as many tokens as embeddings"
        return ids

    def _layout(self, size: tuple[int, int]) -> _Layout:
        """Return how pictures of a size stand in a prompt, asking the processor about a blank one."""
        if size not in self._layouts:
            from PIL import Image

            text, images = [self.processor.image_token], [Image.new("RGB", size)]
            found = self.processor(text=text, images=images, return_text_replacement_offsets=True)
            [[replaced]] = found["text_replacement_offsets"]
            count = list(found["input_ids"][0]).count(self._token)
            self._layouts[size] = _Layout(replaced["replacement"], count)
        return self._layouts[size]


def sight_of(
    album: ImageStore | None, policy: PolicyConfig, device: torch.device, setting: str = "policy.model"
) -> VisionEncoder | None:
    """Return what sees the pictures of an album, and load the model's tower for it; None if there are none."""
    if album is None or album.empty:
        return None
    cache_bytes = int(policy.picture_cache_gb * 2**30)
    return VisionEncoder(load_tower(policy, setting), album.pixels, device, cache_bytes)
