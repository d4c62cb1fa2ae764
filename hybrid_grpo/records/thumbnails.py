"""Small copies of the pictures of prompts, kept in a run's folder for those who look at its completions."""

import base64
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybrid_grpo.data.picture import Picture
from hybrid_grpo.records.files import replace_bytes

FOLDER = "pictures"
_SIDE = 320
"""Longest side of a copy in pixels."""


def described(picture: Picture) -> dict[str, Any]:
    """Return what a saved completion says of a picture of its prompt: its copy's `file`, its `name` and its `size`."""
    kind = "png" if max(picture.size) <= _SIDE else "jpg"
    return {"file": f"{picture.key:x}.{kind}", "name": picture.name, "size": list(picture.size)}


def copies(pictures: Iterable[Picture], known: set[str]) -> dict[str, bytes]:
    """Return the copies of pictures whose files are not `known`, by the names of their files, which are known then."""
    made: dict[str, bytes] = {}
    for picture in pictures:
        file = described(picture)["file"]
        if file not in known:
            known.add(file)
            image, written = picture.open(), io.BytesIO()
            image.thumbnail((_SIDE, _SIDE))
            image.save(written, "PNG" if file.endswith("png") else "JPEG", quality=80)
            made[file] = written.getvalue()
    return made


def write(folder: Path, made: dict[str, bytes]) -> None:
    for file, contents in made.items():
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        replace_bytes(folder / FOLDER / file, contents)


def shown(folder: Path, row: dict[str, Any]) -> list[dict[str, str]]:
    """Return the pictures of a saved completion's prompt as a page shows them, each with its `name` and, if there is a
    copy, its contents as an address (`src`)."""
    return [{"name": of["name"], **_address(folder / FOLDER / of["file"])} for of in row.get("pictures") or ()]


def files(folder: Path, row: dict[str, Any]) -> list[Path]:
    """Return the copies of the pictures of a saved completion's prompt, as far as there are any."""
    found = (folder / FOLDER / of["file"] for of in row.get("pictures") or ())
    return [path for path in found if path.is_file()]


def _address(path: Path) -> dict[str, str]:
    try:
        contents = path.read_bytes()
    except OSError:
        return {}
    kind = "png" if path.suffix == ".png" else "jpeg"
    return {"src": f"data:image/{kind};base64,{base64.b64encode(contents).decode()}"}
