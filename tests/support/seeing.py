"""Tiny models that see: random towers and text models of several families, with their processors."""

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from architecture_proof import draw
from PIL import Image
from tiny_architectures import tiny_architecture
from tokenizers import Tokenizer, models, pre_tokenizers

from hybrid_grpo.model.sight import without_videos

NAMES = {
    "qwen": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"],
    "gemma": ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
    "gemma4": ["<|image|>", "<image|>", "<|image>", "<|video|>", "<|audio|>", "<audio|>", "<|audio>"],
    "smol": ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    + [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)],
    "mistral": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "llava": ["<image>"],
}
"""The special tokens that families have for pictures."""
QWEN_IMAGES = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 24 * 24}}
_SEES = (
    "{% for part in message.content %}{% if part.type == 'image' %}SIGN{% else %}{{ part.text }}{% endif %}{% endfor %}"
)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>"
    "{% if message.content is string %}{{ message.content }}{% else %}" + _SEES + "{% endif %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer_of(family: str) -> Any:
    """Return a tokenizer of single characters with the tokens of a family."""
    special = ["<pad>", "<bos>", "<eos>", "<user>", "<system>", "<assistant>", *NAMES[family]]
    words = [*special, *string.ascii_letters, *" .,:?0123456789\n"]
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    named = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=False))
    more: dict[str, Any] = {}
    if family == "gemma":
        soft = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        more = {"extra_special_tokens": soft}
    if family == "gemma4":
        names = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
        more = {
            "extra_special_tokens": names
            | {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>", "video_token": "<|video|>"}
        }
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, **named, additional_special_tokens=special[3:], **more
    )
    sign = {"qwen": "<|vision_start|><|image_pad|><|vision_end|>", "gemma": "<start_of_image>", "gemma4": "<|image|>"}
    first = sign.get(family, "[IMG]" if family == "mistral" else "<image>")
    tokenizer.chat_template = TEMPLATE.replace("SIGN", first)
    return tokenizer


def _qwen(name: str, tokenizer: Any) -> tuple[Any, Any]:
    config = tiny_architecture(name)
    ids = tokenizer.convert_tokens_to_ids(NAMES["qwen"])
    vision: dict[str, Any] = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 2}
    vision |= {"num_heads": 2, "in_channels": 3, "in_chans": 3, "intermediate_size": 48, "hidden_act": "silu"}
    if name.startswith("qwen2_vl"):
        vision |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 32, "out_hidden_size": 32}
    if name == "qwen2_5_vl":
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    if name.startswith("qwen3"):
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    for field, value in vision.items():
        setattr(config.vision_config, field, value)
    if name.startswith("qwen3") and name != "qwen3_5":
        config.text_config.rope_parameters = {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True
        }  # fmt: skip
    if name == "qwen3_5":
        config.text_config.rope_parameters = {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25,
        }  # fmt: skip
    config.vision_start_token_id, config.image_token_id, config.vision_end_token_id, config.video_token_id = ids
    kind = {"qwen2_vl": tf.Qwen2VLProcessor, "qwen2_5_vl": tf.Qwen2_5_VLProcessor}.get(name, tf.Qwen3VLProcessor)
    return config, without_videos(kind)(tf.Qwen2VLImageProcessorPil(**QWEN_IMAGES), tokenizer)


def _gemma3(name: str, tokenizer: Any) -> tuple[Any, Any]:
    config = tiny_architecture(name)
    config.image_token_index = config.image_token_id = tokenizer.convert_tokens_to_ids("<image_soft_token>")
    config.boi_token_index, config.eoi_token_index = tokenizer.convert_tokens_to_ids(
        ["<start_of_image>", "<end_of_image>"]
    )
    config.mm_tokens_per_image, config.vision_config.image_size, config.vision_config.patch_size = 9, 24, 4
    images = tf.Gemma3ImageProcessorPil(size={"height": 24, "width": 24}, image_seq_length=9)
    return config, tf.Gemma3Processor(images, tokenizer, image_seq_length=9)


def _gemma4(name: str, tokenizer: Any) -> tuple[Any, Any]:
    config = tiny_architecture(name)
    for field, value in (("patch_size", 4), ("pooling_kernel_size", 2), ("position_embedding_size", 64)):
        setattr(config.vision_config, field, value)
    config.image_token_id = tokenizer.convert_tokens_to_ids("<|image|>")
    config.text_config.use_bidirectional_attention = "vision"
    config.boi_token_id, config.eoi_token_id = tokenizer.convert_tokens_to_ids(["<|image>", "<image|>"])
    config.video_token_id, config.audio_token_id = tokenizer.convert_tokens_to_ids(["<|video|>", "<|audio|>"])
    images = tf.Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    return config, without_videos(tf.Gemma4Processor)(None, images, tokenizer, None)


def _smol(name: str, tokenizer: Any) -> tuple[Any, Any]:
    config = tiny_architecture(name)
    config.image_token_id, config.scale_factor = tokenizer.convert_tokens_to_ids("<image>"), 2
    config.vision_config.image_size, config.vision_config.patch_size = 16, 4
    kinds = (
        (tf.SmolVLMImageProcessorPil, tf.SmolVLMProcessor)
        if name == "smolvlm"
        else (tf.Idefics3ImageProcessorPil, tf.Idefics3Processor)
    )
    images = kinds[0](size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    more = {"video_processor": None} if name == "smolvlm" else {}
    return config, without_videos(kinds[1])(images, tokenizer, image_seq_len=4, **more)


def _mistral3(name: str, tokenizer: Any) -> tuple[Any, Any]:
    config = tiny_architecture(name)
    config.image_token_index = config.image_token_id = tokenizer.convert_tokens_to_ids("[IMG]")
    config.vision_config.image_size, config.vision_config.patch_size, config.spatial_merge_size = 32, 4, 2
    images = tf.PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size={"height": 4, "width": 4})
    return config, _PixtralProcessor(images, tokenizer)


class _PixtralProcessor:
    """Stands for transformers' processor, which needs torchvision."""

    image_token, chat_template = "[IMG]", None

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer

    def __call__(self, text: list[str] | None = None, images: list[Image.Image] | None = None, **options: Any) -> Any:
        of_text = {"add_special_tokens": False, "return_tensors": options.get("return_tensors")}
        if not images:
            return self.tokenizer(text, **of_text)
        found = self.image_processor(images, return_tensors="pt")
        if text is None:
            return found
        sizes = [(int(height) // 8, int(width) // 8) for height, width in found["image_sizes"]]
        rows = ["[IMG_BREAK]".join(["[IMG]" * width] * height) + "[IMG_END]" for height, width in sizes]
        first, *others = text[0].split("[IMG]")
        ids = self.tokenizer([first + "".join(map(str.__add__, rows, others))], **of_text)
        offsets = {"text_replacement_offsets": [[{"replacement": row} for row in rows]]}
        return {**ids, **found, **(offsets if options.get("return_text_replacement_offsets") else {})}


def _llava(name: str, tokenizer: Any) -> tuple[Any, Any]:
    config = tiny_architecture(name)
    config.image_token_index = config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    config.vision_config.image_size, config.vision_config.patch_size = 16, 4
    config.vision_feature_layer = -1
    images = tf.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return config, tf.LlavaProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


FAMILIES: dict[str, tuple[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"), ("qwen", _qwen)),
    "gemma3": ("gemma", _gemma3), "gemma4": ("gemma4", _gemma4), "smolvlm": ("smol", _smol),
    "idefics3": ("smol", _smol), "mistral3": ("mistral", _mistral3), "llava": ("llava", _llava),
}  # fmt: skip


def make_seeing(name: str, folder: Path) -> Any:
    """Write a random model of a type that sees, with its processor, to a folder, and return the processor."""
    torch.manual_seed(0)
    family, make = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    config, processor = make(name, tokenizer)
    for field in ("vocab_size", "vocab_size_per_layer_input"):
        if hasattr(config.get_text_config(), field):
            setattr(config.get_text_config(), field, len(tokenizer))
    draw(tf.AutoModelForImageTextToText.from_config(config)).save_pretrained(folder)
    processor.chat_template = tokenizer.chat_template
    processor.image_processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = ("image_seq_len", "image_seq_length", "patch_size", "spatial_merge_size", "num_additional_image_tokens")
    sizes += ("vision_feature_select_strategy",)
    given = {name: getattr(processor, name) for name in sizes if hasattr(processor, name)}
    (folder / "processor_config.json").write_text(json.dumps(given | {"processor_class": type(processor).__name__}))
    return processor


def pictures(seed: int = 0) -> list[Image.Image]:
    """Return random pictures of several sizes."""
    random = np.random.default_rng(seed)
    return [
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for width, height in ((16, 16), (24, 12), (10, 30), (24, 24))
    ]


def make_seeing_classifier(name: str, folder: Path) -> None:
    """Write a random classifier with one label, of a type that sees, with its processor."""
    make_seeing(name, folder)
    config = tf.AutoConfig.from_pretrained(folder, num_labels=1)
    config.get_text_config().pad_token_id = 0
    draw(tf.AutoModelForSequenceClassification.from_config(config)).save_pretrained(folder)


REWARD = """
def kinds(completions, images, **_):
    return [len(set(str(c))) / 20 + sum(image.open().width for image in i or ()) for c, i in zip(completions, images)]
"""


def make_task(folder: Path) -> None:
    """Write a random model that sees, rows of which every fourth has two pictures, and a reward that looks at them."""
    make_seeing("qwen3_vl", folder / "model")
    for number, picture in enumerate(pictures()):
        picture.save(folder / f"{number}.png")
    rows = [{"prompt": f"row {n}", "images": ["0.png", f"{n // 4}.png"] if n % 4 == 0 else None} for n in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "kinds.py").write_text(REWARD)
