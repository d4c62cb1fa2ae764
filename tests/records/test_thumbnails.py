"""Small copies of prompts' pictures: what is written, and what is shown."""

import base64
import io

from PIL import Image
from seeing import pictures

from hybrid_grpo.data.picture import read_picture
from hybrid_grpo.records import thumbnails


def saved(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_copies_are_small_made_once_and_shown_as_addresses_of_their_contents(tmp_path):
    found = [read_picture(saved(image), None, "row") for image in (pictures()[0], Image.new("RGB", (900, 300), "red"))]
    known: set[str] = set()
    made = thumbnails.copies([*found, found[0]], known)
    assert len(made) == 2 and thumbnails.copies(found, known) == {}
    thumbnails.write(tmp_path, made)
    row = {"pictures": list(map(thumbnails.described, found))}
    one, two = thumbnails.shown(tmp_path, row)
    small = Image.open(io.BytesIO(base64.b64decode(one["src"].removeprefix("data:image/png;base64,"))))
    assert small.size == (16, 16) and small.tobytes() == pictures()[0].tobytes()
    reduced = Image.open(io.BytesIO(base64.b64decode(two["src"].removeprefix("data:image/jpeg;base64,"))))
    assert reduced.size == (320, 107) and row["pictures"][1]["size"] == [900, 300]
