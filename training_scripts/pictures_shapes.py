"""Questions about a drawing of shapes, or of bars, for models that see."""

import random
import string
import struct
import zlib
from functools import lru_cache
from typing import Any

import numpy as np

from hybrid_grpo.config.tasks import Row, column

SIDE = 3
"""Cells of a drawing from left to right, and from top to bottom."""
COLOURS = {
    **{"red": (220, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 220), "yellow": (240, 200, 40)},
    **{"purple": (150, 60, 180), "orange": (240, 130, 30)},
}
KINDS = ("square", "circle", "triangle")
CELLS = [f"{letter}{number}" for number in range(1, SIDE + 1) for letter in string.ascii_lowercase[:SIDE]]
"""Names of the cells, row by row from the top."""
QUESTIONS = {
    "count": "How many shapes are there? Answer with a number.",
    "colour": "Which colour is the shape? Answer with a colour.",
    "kind": "Which shape is it? Answer with its name.",
    "place": "Where is the shape? Answer with column and row, like b2.",
    "highest": "Which bar is the highest? Answer with its colour.",
}
_MOST_SHAPES = 4
_CELL = 56
"""Pixels of a cell's side."""


def draw_scene(source: random.Random) -> dict[str, Any]:
    """Return a random scene: one shape among dots, several shapes, or bars of different heights."""
    count = source.choice([0, 1, source.randint(2, _MOST_SHAPES)])
    if not count:
        heights = source.sample(range(1, SIDE + 1), SIDE)
        return {"bars": dict(zip(source.sample(list(COLOURS), SIDE), heights, strict=True))}
    places = source.sample(CELLS, count if count > 1 else 1 + source.randrange(_MOST_SHAPES))
    shown = [f"{source.choice(list(COLOURS))} {source.choice(KINDS)}" for _ in range(count)]
    return {"shapes": dict(zip(places, shown, strict=False)), "dots": places[count:]}


def ask(scene: dict[str, Any]) -> list[Row]:
    """Return a row for each question that can be asked about a scene."""
    one = len(scene.get("shapes", ())) == 1
    names = ("highest",) if "bars" in scene else ("colour", "kind", "place") if one else ("count",)
    return [{"scene": scene, "question": name} for name in names]


def shapes(row: Row) -> Row:
    """A question about a drawing, made of the columns scene and question; `cell` is a cell's side in pixels."""
    scene, asked = column(row, "scene"), column(row, "question")
    if "bars" in scene:
        answer = max(scene["bars"], key=scene["bars"].get)
    else:
        [(place, shape), *others] = scene["shapes"].items()
        colour, kind = shape.split()
        answer = {"count": str(1 + len(others)), "place": place, "colour": colour, "kind": kind}[asked]
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTIONS[asked]}]}]
    picture = {"bytes": png(drawing(scene, row.get("cell") or _CELL))}
    return {"prompt": prompt, "images": [picture], "answer": answer, "completion": answer}


def drawing(scene: dict[str, Any], cell: int) -> np.ndarray:
    """Return the drawing of a scene, uint8 [height, width, 3]."""
    canvas = np.full((SIDE * cell, SIDE * cell, 3), 255, dtype=np.uint8)
    shown = {**scene.get("shapes", {}), **dict.fromkeys(scene.get("dots", ()), "black dot")}
    masks = _masks(cell)
    for place, shape in shown.items():
        colour, kind = shape.split()
        row, place_in_row = divmod(CELLS.index(place), SIDE)
        part = canvas[row * cell : (row + 1) * cell, place_in_row * cell : (place_in_row + 1) * cell]
        part[masks[kind]] = COLOURS.get(colour, 0)
    for number, (colour, height) in enumerate(scene.get("bars", {}).items()):
        gap = cell // 8
        canvas[(SIDE - height) * cell :, number * cell + gap : (number + 1) * cell - gap] = COLOURS[colour]
    return canvas


@lru_cache
def _masks(cell: int) -> dict[str, np.ndarray]:
    """The pixels of a cell that each kind of shape covers, bool [cell, cell]."""
    y, x = (np.indices((cell, cell)) + 0.5) / cell - 0.5
    return {
        "square": np.maximum(abs(x), abs(y)) < 0.36,
        "circle": x**2 + y**2 < 0.4**2,
        "triangle": (y < 0.38) & (abs(x) < (y + 0.42) / 2),
        "dot": x**2 + y**2 < 0.15**2,
    }


def png(pixels: np.ndarray) -> bytes:
    """Return uint8 pixels [height, width, 3] as a PNG file."""
    height, width, _ = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = np.concatenate([np.zeros((height, 1), dtype=np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
