"""A picture of a prompt: where it lies, what is refused, and what is converted.

A data set names a picture by its path or brings its bytes. Its header is read when the prompts are, its pixels when the
model's tower or a reward function needs them. Nothing here imports torch, which a reward's worker then need not load.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.model.visual_tokens import KEY_BITS

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST = 64_000_000
"""Pixels above which a picture is refused rather than reduced: decoding one of these takes 200 MB."""
_LARGEST_BYTES = 100 * 2**20
_MOST_UNEVEN = 200
"""Largest ratio of a picture's sides; processors of Qwen take no other."""
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Formats that are read. Others, as vector graphics or documents, need programs of their own."""
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
"""What a whole file of a format has at its end; others may have more after it."""
_QUIET = partial(warnings.catch_warnings, action="ignore")
"""Sizes are checked here; of the warnings of decoders nothing follows."""


@dataclass(frozen=True)
class Picture:
    """A picture of a prompt, by reference. Reward functions, which get it too, may `open` it."""

    key: int
    """Follows from the picture's contents."""
    name: str
    """Its path as the row has it, or the place of its bytes in the data."""
    path: str | None
    data: bytes | None = field(repr=False)
    """The file's contents, if it has no path."""
    size: tuple[int, int]
    """Width and height in pixels, upright, as the model gets it."""

    def __str__(self) -> str:
        return self.name

    @property
    def url(self) -> str:
        """Its file as an address of type `data:`."""
        data = _contents(Path(self.path), str(self)) if self.path is not None else self.data or b""
        return f"data:image/*;base64,{b64encode(data).decode()}"

    def open(self) -> Image:
        """Return the picture, upright and in RGB, as the model gets it. Raises UserError if it is broken or gone."""
        from PIL import Image, ImageOps

        try:
            with _QUIET(), Image.open(self.path or io.BytesIO(self.data or b"")) as image:
                upright = _rgb(ImageOps.exif_transpose(image) if _orientation(image) != 1 else image)
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            raise UserError(f"the picture {self.name} cannot be read: {error}: replace it or remove its row") from error
        return upright if upright.size == self.size else upright.resize(self.size, Image.Resampling.BICUBIC)


def _orientation(image: Image) -> int:
    """Return how a picture is to be turned (EXIF), without reading its pixels."""
    # Of a PNG, all of it would be read to look for this after the pixels.
    return int(image.getexif().get(0x0112, 1)) if image.format != "PNG" or "exif" in image.info else 1


def _rgb(image: Image) -> Image:
    """Return a picture in 8-bit RGB: the first frame, transparency on white, 16-bit gray by its upper byte."""
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        # PIL would cut off all above 255.
        gray = np.asarray(image, dtype=np.float64)
        gray = gray / 256 if gray.max() > 255 else gray
        return Image.fromarray(gray.clip(0, 255).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        clear = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
    return image.convert("RGB")


def read_picture(value: Any, folder: Path | None, where: str, max_pixels: int | None = None) -> Picture:
    """Return the picture that a row gives as a path, as bytes, as `datasets` stores one, as a PIL image, or as it was
    returned here. Only its header is read. Paths are relative to `folder`, and may not lead out of it. Raises
    UserError, in which `where` describes the row, if it is absent, too large, no picture, or visibly broken."""
    if isinstance(value, Picture):
        return value
    path, data, name = _source(value, folder, where)
    start = f"{where}: the picture {name}"
    contents = data if data is not None else _contents(Path(path or ""), start)
    refuse(not contents, f"{start} is empty: replace it, or remove the row")
    size = checked_size(contents, start)
    key = int.from_bytes(hashlib.blake2b(contents, digest_size=8).digest(), "big") >> (64 - KEY_BITS)
    if max_pixels is not None and size[0] * size[1] > max_pixels:
        scale = (max_pixels / (size[0] * size[1])) ** 0.5
        size = max(1, int(size[0] * scale)), max(1, int(size[1] * scale))
    return Picture(key, name, path, data, size)


def _source(value: Any, folder: Path | None, where: str) -> tuple[str | None, bytes | None, str]:
    """Return the path of a picture or its bytes, and a name of it."""
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        if value.get("bytes") is not None:
            return None, bytes(value["bytes"]), str(value.get("path") or f"of {where}")
        value = value.get("path")
    if isinstance(value, bytes | bytearray):
        return None, bytes(value), f"of {where}"
    if hasattr(value, "save") and hasattr(value, "size"):
        written = io.BytesIO()
        value.save(written, "PNG")
        return None, written.getvalue(), f"of {where}"
    if not isinstance(value, str | Path) or not str(value):
        raise UserError(f"{where} has {value!r:.40} in the place of a picture: give a path or a file's bytes")
    text = str(value)
    refuse(
        text.startswith(("http:", "https:", "data:")),
        f"{where}: the picture {text:.60} is an address, and none are fetched: download it, and give its path",
    )
    path = Path(text.removeprefix("file://"))
    if not path.is_absolute():
        base = (folder or Path()).resolve()
        path = (base / path).resolve()
        refuse(
            not path.is_relative_to(base),
            f"{where}: the picture {text} lies outside the folder of its data, {base}: give its absolute path",
        )
    return str(path), None, text


def _contents(path: Path, start: str) -> bytes:
    try:
        refuse(not path.is_file(), f"{start} is not a file ({path}): correct the path, or remove the row")
        length = path.stat().st_size
        refuse(length > _LARGEST_BYTES, f"{start} has {length >> 20} MiB, above {_LARGEST_BYTES >> 20}: reduce it")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{start} cannot be read: {error}: correct the path, or remove the row") from error


def checked_size(contents: bytes, start: str) -> tuple[int, int]:
    """Return a picture's width and height, upright, from its header. Raises UserError if it is not to be used."""
    from PIL import Image, UnidentifiedImageError

    way_out = "replace it, or remove the row"
    try:
        with _QUIET(), Image.open(io.BytesIO(contents), formats=_FORMATS) as image:
            kind, (width, height), turned = str(image.format), image.size, _orientation(image)
    except UnidentifiedImageError:
        kinds = ", ".join(_FORMATS)
        is_drawing = b"<svg" in contents[:1000].lower()
        what = "is a vector graphic (SVG)" if is_drawing else "is no picture that is read, or is broken"
        raise UserError(f"{start} {what}: convert it to one of {kinds}, or remove the row") from None
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        text = "has too many pixels" if isinstance(error, Image.DecompressionBombError) else f"is broken ({error})"
        raise UserError(f"{start} {text}: {way_out}") from None
    refuse(
        width * height > LARGEST,
        f"{start} has {width} x {height} pixels, more than {LARGEST // 10**6} million: reduce it, or remove the row",
    )
    refuse(
        max(width, height) > _MOST_UNEVEN * min(width, height),
        f"{start} has {width} x {height} pixels, a side more than {_MOST_UNEVEN} times the other: {way_out}",
    )
    cut_off = _ENDS.get(kind, b"") not in contents[-4096:]
    cut_off |= kind == "GIF" and not contents.rstrip(b"\0").endswith(b";")
    refuse(cut_off, f"{start} is cut off, its file has no end: {way_out}")
    return (height, width) if turned in (5, 6, 7, 8) else (width, height)
