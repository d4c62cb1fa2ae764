"""Pictures of rows: what is read, converted, and refused, before any model loads."""

import io
import json
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from rank_threads import in_ranks
from seeing import make_seeing, pictures

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.completion import Prompt
from hybrid_grpo.data.picture import read_picture
from hybrid_grpo.data.pictures import ImageStore, given_pictures, placed
from hybrid_grpo.data.prompts import count_equal, read_prompts
from hybrid_grpo.model.loading import load_config, load_tokenizer
from hybrid_grpo.model.visual_tokens import keys_of

WHITE = Image.new("RGB", (12, 8), "white")


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


PNG, JPEG = saved(pictures()[3]), saved(pictures()[3], "JPEG")


def header(width, height):
    """A PNG of one line that says it has this size."""
    of = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + of + struct.pack(">I", zlib.crc32(of)) + PNG[33:]


REFUSED = {
    "truncated.jpg": (JPEG[: len(JPEG) // 2], "is cut off|is broken"),
    "truncated.png": (PNG[:-20], "is cut off, its file has no end"), "head only.png": (PNG[:20], "is broken"),
    "bomb.png": (header(100_000, 100_000), "has too many pixels"),
    "large.png": (header(9_000, 9_000), "has 9000 x 9000 pixels, more than 64 million"),
    "strip.png": (header(5_000, 3), "has 5000 x 3 pixels, a side more than 200 times the other"),
    "nothing.png": (b"", "is empty"), "zeros.png": (bytes(4096), "is no picture that is read, or is broken"),
    "text.png": (b"not a picture", "is no picture that is read, or is broken"),
    "drawing.svg": (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "is a vector graphic"),
    "page.pdf": (b"%PDF-1.7\n%%EOF", "is no picture that is read, or is broken"),
    "page.html": (b"<html>404</html>", "is no picture that is read, or is broken"),
    "icon.ico": (saved(WHITE, "ICO"), "is no picture that is read, or is broken"),
    "half.gif": (saved(pictures()[3].convert("P"), "GIF")[:-40], "is cut off, its file has no end"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_no_whole_picture_is_refused_with_its_row_and_name(name, tmp_path):
    contents, why = REFUSED[name]
    (tmp_path / name).write_bytes(contents)
    for value in (name, str(tmp_path / name), {"bytes": contents, "path": name}):
        with pytest.raises(UserError) as raised:
            read_picture(value, tmp_path, "row 7 (from 0) of rows.jsonl")
        said = str(raised.value)
        assert any(of in said for of in why.split("|")) and name in said and "\n" not in said
        assert said.startswith("row 7 (from 0) of rows.jsonl: the picture ")


def test_what_is_no_file_of_the_data_is_refused(tmp_path):
    inside, outside = tmp_path / "data", tmp_path / "other"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a.png").write_bytes(PNG)
    (inside / "link.png").symlink_to(outside / "a.png")
    (inside / "loop.png").symlink_to(inside / "loop.png")
    for value, why in {
        "missing.png": "is not a file",
        ".": "is not a file",
        "../other/a.png": "lies outside the folder of its data",
        "link.png": "lies outside the folder of its data",
        "https://example.com/a.png": "is an address, and none are fetched",
        "data:image/png;base64,AAAA": "is an address, and none are fetched",
        "": "in the place of a picture",
    }.items():
        with pytest.raises(UserError, match=why):
            read_picture(value, inside, "row 0")
    for value in (None, 7, {"path": None}, ["a.png"], {"url": "a.png"}):
        with pytest.raises(UserError, match=r"row 0 has .* in the place of a picture: give a path or a file's bytes"):
            read_picture(value, inside, "row 0")
    with pytest.raises((UserError, RuntimeError)):
        read_picture("loop.png", inside, "row 0")
    assert read_picture("a.png", inside, "row 0").key == read_picture({"bytes": PNG}, None, "row 0").key


def test_what_is_no_plain_rgb_is_converted_as_the_page_says():
    def seen(image, kind="PNG", **options):
        return np.asarray(read_picture(saved(image, kind, **options), None, "row 0").open())

    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert (seen(clear) == 255).all(), "transparency is white"
    half = seen(Image.new("LA", (8, 8), (0, 128)))
    assert abs(int(half[0, 0, 0]) - 127) <= 1
    assert (seen(Image.fromarray(np.full((8, 8), 0x8040, dtype=np.uint16))) == 0x80).all(), "the upper byte of 16 bits"
    assert (seen(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG") >= 254).all()
    assert (seen(Image.new("1", (8, 8), 1)) == 255).all() and (seen(Image.new("P", (8, 8), 0)) == 0).all()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    assert (seen(frames[0], "GIF", save_all=True, append_images=frames[1:])[0, 0] == (255, 0, 0)).all(), "first frame"
    exif = Image.Exif()
    exif[0x0112] = 6  # turned to the right
    turned = read_picture(saved(WHITE, "JPEG", exif=exif), None, "row 0")
    assert turned.size == turned.open().size == (8, 12)
    reduced = read_picture(saved(WHITE), None, "row 0", max_pixels=24)
    assert reduced.size == reduced.open().size == (6, 4)


def test_a_picture_that_breaks_or_goes_later_says_which(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    picture = read_picture("a.png", tmp_path, "row 0")
    (tmp_path / "a.png").write_bytes(PNG[:60] + bytes(len(PNG) - 60))
    with pytest.raises(UserError, match=r"the picture a.png cannot be read: .*: replace it or remove its row"):
        picture.open()
    (tmp_path / "a.png").unlink()
    with pytest.raises(UserError, match=r"the picture a.png cannot be read"):
        picture.open()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    make_seeing("qwen3_vl", folder)
    return str(folder)


def prompts(model, rows, tmp_path, **data):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    album = ImageStore.of(model, load_config(model))
    config = DataConfig(path=str(tmp_path / "rows.jsonl"), **data)
    return read_prompts(config, load_tokenizer(model), album=album)[0], album


def test_every_way_to_write_a_prompt_with_pictures_gives_the_same_tokens(model, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    image, text = {"type": "image"}, {"type": "text", "text": "What?"}
    user = {"role": "user"}
    rows = [
        {"prompt": [{**user, "content": [image, text]}], "images": ["a.png"]},
        {"prompt": [{**user, "content": [image, text]}], "images": "a.png"},
        {"prompt": [{**user, "content": [{**image, "image": "a.png"}, text]}]},
        {"prompt": [{**user, "content": [{"type": "image_url", "image_url": {"url": "a.png"}}, text]}]},
        {"prompt": [{**user, "content": "<image>What?"}], "images": ["a.png"]},
        {"prompt": "<image>What?", "images": ["a.png"]},
        {"prompt": "What?", "images": ["a.png"]},
        {"prompt": "What?", "images": []},
        {"prompt": [{**user, "content": "What?"}]},
    ]
    found, album = prompts(model, rows, tmp_path)
    seen, blind = found[:7], found[7:]
    assert len({tuple(prompt.token_ids) for prompt in seen}) == 1
    key = read_picture("a.png", tmp_path, "row").key
    assert keys_of(seen[0].token_ids) == [key] and sum(token < 0 for token in seen[0].token_ids) == 9
    assert not any(token < 0 for prompt in blind for token in prompt.token_ids) and not album.empty
    assert [str(picture) for picture in seen[0].columns["images"]] == ["a.png"]


def test_ranks_read_a_share_each_and_have_all(model, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    chat = {"prompt": [{"role": "user", "content": "What?"}], "images": None, "number": 7}
    image = {"type": "image", "image": "a.png"}
    # One rank of three has no pictures, and the template comes with the first.
    rows = [chat, chat, {"prompt": [{"role": "user", "content": [image]}], "number": 8}, chat, {"prompt": "long" * 99}]
    config = DataConfig(path=str(tmp_path / "rows.jsonl"), max_prompt_tokens=99)

    def read(rank: int) -> tuple[list[Prompt], list[tuple[int, ...]]]:
        tokenizer, album = load_tokenizer(model), ImageStore.of(model, load_config(model))
        tokenizer.chat_template = None
        found, _ = read_prompts(config, tokenizer, album=album)
        keys = {key for prompt in found for key in keys_of(prompt.token_ids)}
        return found, [tuple(album.pixels(key)["pixel_values"].shape) for key in keys]

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (alone,) = in_ranks(1, read)
    assert [prompt.id for prompt in alone[0]] == [0, 1, 2, 3] and alone[1] == [(36, 96)]
    assert in_ranks(3, read) == [alone] * 3
    rows[1], rows[3] = {"prompt": "x", "images": "b.png"}, {"prompt": "x", "images": "c.png"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for ranks in 1, 2, 3:
        with pytest.raises(UserError, match=r"row 1 .*: the picture b.png is not a file"):
            in_ranks(ranks, read)

    def read_another(rank: int) -> None:
        (tmp_path / f"{rank}.jsonl").write_text(json.dumps({"prompt": f"of machine {rank}"}))
        read_prompts(replace(config, path=str(tmp_path / f"{rank}.jsonl")), load_tokenizer(model))

    with pytest.raises(UserError, match=r"not all ranks read the same prompts: give every machine the same data"):
        in_ranks(2, read_another)


def showing(count):
    return [{"role": "user", "content": [{"type": "image"}] * count}]


@pytest.mark.parametrize("row, data, why", [
    ({"prompt": showing(2), "images": ["a.png"]}, {}, "has 1 pictures, and its prompt 2 places"),
    ({"prompt": showing(1)}, {}, "has 0 pictures, and its prompt 1 places"),
    ({"prompt": "x", "images": ["a.png"] * 3}, {"max_images": 2}, "data.max_images 2: row 1 .* has 3 pictures"),
    ({"prompt": "x", "images": ["a.png"]}, {"chat_template": "never"}, "and its prompt 0 places"),
    ({"prompt": "x", "images": [{"a": 1}]}, {}, "in the place of a picture"),
    ({"prompt": "x", "images": 5}, {}, "in the place of a picture"),
])  # fmt: skip
def test_rows_whose_pictures_do_not_fit_are_refused(row, data, why, model, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    with pytest.raises(UserError, match=why) as raised:
        prompts(model, [{"prompt": "fine"}, row], tmp_path, **data)
    assert "\n" not in str(raised.value) and "row 1" in str(raised.value)


def test_the_same_question_about_another_picture_is_another_prompt(model, tmp_path):
    for name, picture in zip("ab", pictures(), strict=False):
        picture.save(tmp_path / f"{name}.png")
    one, two = ([{"prompt": "What?", "images": [f"{name}.png"]}] for name in "ab")
    (first,), _ = prompts(model, one, tmp_path)
    (second,), _ = prompts(model, two, tmp_path)
    assert count_equal([first], [first]) == 1 and count_equal([first], [second]) == 0


def test_names_of_tokens_in_a_text_are_text(model, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    [prompt], _ = prompts(model, [{"prompt": "<|image_pad|> a", "images": ["a.png"]}], tmp_path)
    assert len(keys_of(prompt.token_ids)) == 1


def test_pictures_go_where_templates_have_a_place_for_them():
    image = {"type": "image"}
    system = {"role": "system", "content": "s"}
    assert placed([system, {"role": "user", "content": "q"}], 2)[1]["content"] == [
        image,
        image,
        {"type": "text", "text": "q"},
    ]
    between = placed([{"role": "user", "content": "a<image>b<image>"}], 2)[0]["content"]
    assert between == [{"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}, image]
    assert given_pictures("q", ("a", "b")) == ("q", ["a", "b"])


def test_columns_of_datasets_with_pictures_are_read_undecoded(model, tmp_path):
    import datasets

    images = [saved(picture) for picture in pictures()[:2]]
    rows = {"prompt": ["a", "b"], "images": [[{"bytes": i, "path": None}] for i in images]}
    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    data = datasets.Dataset.from_dict(rows, features=features)
    data.to_parquet(str(tmp_path / "rows.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    expected = [read_picture(image, None, "row").key for image in images]
    for path in (str(tmp_path / "rows.parquet"), str(tmp_path / "saved"), data):
        album = ImageStore.of(model, load_config(model))
        found, _ = read_prompts(DataConfig(path=path), load_tokenizer(model), album=album)
        assert [keys_of(prompt.token_ids) for prompt in found] == [[key] for key in expected]


def sizes(images, return_tensors):
    """Stands for a processor."""
    return {"sizes": [image.size for image in images]}


def test_a_picture_is_there_as_long_as_any_prompt_has_it():
    first, second = (read_picture(saved(WHITE), None, "row 0") for _ in range(2))
    key, album = first.key, ImageStore(lambda: sizes, 7)
    album.keeps = False
    album.take([first, first, second])
    del first
    assert album.pixels(key) == {"sizes": [(12, 8)]}
    del second
    with pytest.raises(KeyError):
        album.pixels(key)
    kept = ImageStore(lambda: sizes, 7)
    kept.take([read_picture(saved(WHITE), None, "row 0")])
    assert kept.pixels(key) == {"sizes": [(12, 8)]}
