"""What tools, environments and users return, as the model reads it: text with pictures in it.

This runs in worker processes, and needs no torch.
"""

import io
import json
from base64 import b64decode, b64encode
from hashlib import sha256
from typing import Any

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.episodes import PLACE, Observation
from hybrid_grpo.data.picture import checked_size
from hybrid_grpo.distributed.workers.messages import LONGEST_TEXT, checked_text

SHOWS = "shows_pictures"
"""Attribute of a tool's or a user's function, or of an environment's class, whose observations may have pictures."""
_LARGEST_FILE = 1 << 27
"""Maximum number of characters of a picture's file in base 64."""


class Unreadable(ValueError):
    """The model cannot read what was returned; the message is the rest of a sentence that begins with who did it."""


def error_text(why: object) -> str:
    """Return what the model reads in place of an observation that there is not."""
    return f"error: {why}"


def shows_pictures(subject: Any) -> bool:
    """Whether a function or a class says that its observations may have pictures."""
    return getattr(subject, SHOWS, False) is True


def observed(result: Any, *, shows: bool) -> Observation:
    """Return what was returned as the model reads it. If it `shows` pictures, they are PIL's, arrays or the bytes of a
    file, by themselves or in a list of texts and pictures, or parts of a chat's message. Raises Unreadable for a
    picture that is not one, or that was not to be expected."""
    parts = result if isinstance(result, list) else [result]
    if not shows:
        if any(hasattr(part, "save") or (isinstance(part, dict) and part.get("type") == "image") for part in parts):
            raise Unreadable(f"returned a picture: set its attribute {SHOWS} to True")
        return _plain(result)
    if not (any(map(_is_part, parts)) or all(isinstance(part, str) for part in parts)):
        return _plain(result)
    files: list[bytes] = []

    def text_of(part: Any) -> str:
        if isinstance(part, dict) and part.get("type") == "text":
            part = part.get("text")
        if isinstance(part, str):
            return part.replace(PLACE, "")
        files.append(_file_of(part.get("image") if isinstance(part, dict) else part))
        return PLACE

    text = checked_text("".join(map(text_of, parts)))
    if text.count(PLACE) != len(files):
        raise Unreadable(f"returned pictures after more than {LONGEST_TEXT} characters")
    return Observation(text, tuple(files))


def _plain(result: Any) -> Observation:
    if isinstance(result, bytes | bytearray):
        result = bytes(result).decode(errors="replace")
    if not isinstance(result, str):
        result = json.dumps(result, ensure_ascii=False, default=str)
    return Observation(checked_text(result).replace(PLACE, ""))


def _is_part(value: Any) -> bool:
    is_typed = isinstance(value, dict) and value.get("type") in ("image", "text")
    return is_typed or isinstance(value, bytes) or hasattr(value, "save") or _is_array(value)


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array_interface__") and not hasattr(value, "save")


def _file_of(picture: Any) -> bytes:
    if isinstance(picture, bytes):
        try:
            checked_size(picture, "what")
        except UserError as error:
            raise Unreadable(f"returned {str(error).rpartition(': ')[0]}") from error
        return picture
    written = io.BytesIO()
    try:
        if _is_array(picture):
            from PIL import Image

            picture = Image.fromarray(picture)
        if not hasattr(picture, "save"):
            raise TypeError("return PIL's, an array of 8-bit pixels, or the bytes of a file")
        picture.save(written, "PNG")
    except (OSError, TypeError, ValueError) as error:
        raise Unreadable(f"returned {picture!r:.100} in the place of a picture: {error}") from error
    return written.getvalue()


def digest(file: bytes) -> str:
    """Return what tells a picture's file from others."""
    return sha256(file).hexdigest()


def sent(observation: Observation) -> dict[str, Any]:
    """Return an observation as a worker sends it."""
    return {"text": observation.text, "pictures": [b64encode(file).decode() for file in observation.pictures]}


def received(value: Any) -> Observation:
    """Return the observation that a worker sent. Raises ValueError, TypeError or LookupError if it is none."""
    files = [b64decode(checked_text(file, _LARGEST_FILE), validate=True) for file in value["pictures"]]
    text = checked_text(value["text"])
    if text.count(PLACE) != len(files):
        raise ValueError("pictures without a place")
    return Observation(text, tuple(files))
