"""Pictures in the answers of tools, without a model."""

import json

import pytest
import transformers as tf
from partner_answers import answer
from PIL import Image
from seeing import QWEN_IMAGES
from tool_tokenizers import QWEN, tool_tokenizer

from hybrid_grpo.config import DataConfig, RolloutConfig, ScoringConfig, TrainConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import build
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.data.completion import Completion
from hybrid_grpo.data.completion_records import completion_of, record_of
from hybrid_grpo.data.pictures import ImageStore
from hybrid_grpo.generation import Request
from hybrid_grpo.model.sight import without_videos
from hybrid_grpo.model.visual_tokens import keys_of
from hybrid_grpo.turns import partners as module
from hybrid_grpo.turns.partners import TurnResponders, partners_of
from hybrid_grpo.turns.tools.tools import Tools

TOOLS = '''
import io

import numpy as np
from PIL import Image


def draw(side: int):
    """
    Draw a square.

    Args:
        side: in pixels.
    """
    return ["It is ", Image.new("RGB", (side, side), "red"), f" of {side}."]


def several(count: int):
    """
    Draw several squares.

    Args:
        count: how many.
    """
    return [{"type": "image", "image": np.full((16, 16, 3), k, np.uint8)} for k in range(count)]


def measure(side: int) -> dict:
    """
    Return a size.

    Args:
        side: in pixels.
    """
    return {"pixels": side * side} if side < 99 else np.zeros((side, 4), np.float32)


def broken(side: int):
    """
    Return a file without its end.

    Args:
        side: in pixels.
    """
    written = io.BytesIO()
    Image.new("RGB", (side, side)).save(written, "PNG")
    return written.getvalue()[:-9]


def silent(side: int):
    """
    Show what nobody expects.

    Args:
        side: in pixels.
    """
    return Image.new("RGB", (side, side))


draw.shows_pictures = several.shows_pictures = broken.shows_pictures = measure.shows_pictures = True
'''
SIGN = "<|vision_start|><|image_pad|><|vision_end|>"
SAID = (
    "{% macro said(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    f"{{% if part.type == 'image' %}}{SIGN}{{% else %}}{{{{ part.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}"
    "{% endmacro %}"
)
NAMES = ("draw", "several", "measure", "broken", "silent")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A processor whose template has places for pictures in results of tools, and the file of the tools."""
    tokenizer = tool_tokenizer("hermes")
    names = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.chat_template = SAID + QWEN.replace("{{ message.content }}", "{{ said(message.content) }}")
    processor = without_videos(tf.Qwen2VLProcessor)(tf.Qwen2VLImageProcessorPil(**QWEN_IMAGES), tokenizer)
    file = tmp_path_factory.mktemp("tools") / "drawing.py"
    file.write_text(TOOLS)
    return processor, file


@pytest.fixture(scope="module")
def tools(seen):
    return Tools(rollout(seen[1]), ScoringConfig(workers=2))


def rollout(file, **more):
    return RolloutConfig(tools=[f"{file}:{name}" for name in NAMES], max_turns=9, **{"max_tool_tokens": 200, **more})


def album_of(processor):
    return ImageStore(lambda: processor, processor.tokenizer.convert_tokens_to_ids("<|image_pad|>"))


def told(seen, tools, calls, **more):
    """The tokens that answer a turn with these calls, and the completion that ends after it."""
    processor, file = seen
    tokenizer, album = processor.tokenizer, album_of(processor)
    config = rollout(file, **more)
    given = {}, (tokenizer.eos_token_id,)
    partners = TurnResponders([tools], tools, config, tokenizer, *given, seen=(album, DataConfig(max_images=3)))
    partners.begin([Request([5] * 9, [1], max_total_tokens=4000, prompt=Prompt(0, "go", [5] * 9, {}))])
    text = "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )
    turn = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert partners.ended(1, turn, 1000) is None
    ids = answer(partners)
    last = Completion([*turn, 7], [0.0] * (len(turn) + 1), "length", "so", ((len(turn), ids),))
    return ids, partners.finished(1, last)


def test_results_are_read_as_the_processor_writes_them(seen, tools):
    """Texts and pictures of several calls in one turn, in order."""
    calls = [("draw", {"side": 24}), ("measure", {"side": 3}), ("several", {"count": 2})]
    ids, completion = told(seen, tools, calls)
    processor, tokenizer = seen[0], seen[0].tokenizer
    texts = [f"It is {SIGN} of 24.", '{"pixels": 9}', SIGN * 2]
    results = "".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)
    whole = f"\n<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n"
    drawn = [Image.new("RGB", (side, side)) for side in (24, 16, 16)]
    expected = processor(text=[whole], images=drawn, add_special_tokens=False)["input_ids"][0]
    place = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert [place if token < 0 else token for token in ids] == list(expected)
    assert [picture.size for picture in completion.pictures] == [(24, 24), (16, 16), (16, 16)]
    assert keys_of(ids) == [picture.key for picture in completion.pictures]
    assert completion.messages[1]["content"] == [
        {"type": "text", "text": "It is "}, {"type": "image"}, {"type": "text", "text": " of 24."}
    ]  # fmt: skip
    assert completion.messages[2]["content"] == '{"pixels": 9}'
    assert completion_of(json.loads(json.dumps(record_of(completion)))) == completion


@pytest.mark.parametrize(("name", "arguments", "room", "error"), [
    ("broken", {"side": 24}, 200, "error: broken returned what is cut off, its file has no end"),
    ("measure", {"side": 99}, 200, "error: measure returned <PIL.Image.Image image mode=F size=4x99"),
    ("silent", {"side": 24}, 200, "error: silent returned a picture: set its attribute shows_pictures to True"),
    ("several", {"count": 4}, 400, "error: data.max_images 3: the answer to turn 1 has 4 pictures: raise it, or"),
    ("several", {"count": 3}, 66, "error: pictures of 18 tokens, and 14 may be shown"),
])  # fmt: skip
def test_a_picture_that_cannot_be_shown_is_an_error_that_the_model_reads(seen, tools, name, arguments, room, error):
    ids, completion = told(seen, tools, [(name, arguments)], max_tool_tokens=room)
    said = completion.messages[1]["content"]
    assert said and (said.startswith(error) or error.startswith(said))
    assert len(ids) <= room and not completion.pictures and min(ids) >= 0


def test_text_beside_a_picture_is_cut_to_what_the_picture_leaves(seen, tools):
    for room, text in ((76, " of 24."), (75, " of 24"), (70, " "), (60, None)):
        ids, completion = told(seen, tools, [("draw", {"side": 24})], max_tool_tokens=room)
        content = completion.messages[1]["content"]
        if text is None:
            assert content.startswith("error: p") and len(ids) <= room
        else:
            assert [part.get("text") for part in content] == ["It is ", None, text] and len(ids) == room


def test_who_shows_pictures_needs_a_model_that_sees_them_and_a_template_that_has_a_place(seen, tools, monkeypatch):
    processor, file = seen
    monkeypatch.setattr(module, "Tools", lambda *_: tools)
    tokenizer = processor.tokenizer
    config = build(TrainConfig, {"rollout": {"tools": [f"{file}:draw"]}, "policy": {"model": "x"}})
    with pytest.raises(UserError, match=r"^rollout\.tools shows pictures, and policy\.model sees none: take"):
        partners_of(config, tokenizer, (tokenizer.eos_token_id,))
    album = album_of(processor)
    assert partners_of(config, tokenizer, (tokenizer.eos_token_id,), album) and not album.empty
    before, tokenizer.chat_template = (
        tokenizer.chat_template,
        QWEN.replace(
            "message.content }}\n</tool",
            "message.content if message.content is string else message.content[0].text }}\n</tool",
        ),
    )
    try:
        with pytest.raises(UserError, match=r"^rollout\.tools shows .* no place for them in a tool's result: take a"):
            partners_of(config, tokenizer, (tokenizer.eos_token_id,), album)
    finally:
        tokenizer.chat_template = before
