"""Write a task with pictures to a folder: a tiny Qwen3-VL model with its processor, and questions about drawings.

The questions are about small drawings (pictures_shapes.py). The warmed-up model sees some of what is drawn, and says
so half of the time: GRPO teaches it to look, and to answer. The tower of the model is random, and stays so: what it
makes of a cell of a drawing is another for every colour and kind of shape, and the text model learns to read it.
"""

import json
import random
from pathlib import Path

import torch
from lookup_task import read_arguments
from pictures_shapes import CELLS, COLOURS, KINDS, QUESTIONS, SIDE, ask, draw_scene, shapes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration, logging
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

ROWS = {"sft": 4_096, "train": 4_096, "heldout": 512}
SURE, UNSURE = 0.5, "unsure"
"""Share of the warm-up's rows that give the answer, and what the others say."""
CELL = 8
"""Pixels of a cell's side: one token of the tower."""
CONTROL = [
    *("<pad>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word, number and sign."""
    words = " ".join(QUESTIONS.values()).replace(",", " , ").replace(".", " . ").replace("?", " ? ").split()
    names = [word for word in words if "{" not in word]
    known = [*CONTROL, "user", "assistant", *names, UNSURE, *COLOURS, *KINDS, *CELLS, *map(str, range(SIDE * SIDE))]
    ids = {token: number for number, token in enumerate(dict.fromkeys(known))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated")]
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", additional_special_tokens=CONTROL[3:]
    )
    made.chat_template = TEMPLATE
    return made


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3VLForConditionalGeneration:
    """A model with random weights, of less than a million parameters."""
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    config = Qwen3VLConfig(
        text_config={
            **{"vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128},
            **{"tie_word_embeddings": True, "initializer_range": 0.08, "bos_token_id": None},
            **{"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]},
        },
        vision_config={
            **{"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": CELL // 2},
            **{"spatial_merge_size": 2, "out_hidden_size": 128, "num_position_embeddings": 64},
            **{"deepstack_visual_indexes": [], "initializer_range": 0.3},
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        # Places count as much as colours do, and pictures as much as words.
        model.model.visual.pos_embed.weight.mul_(10)
        model.model.visual.merger.linear_fc2.weight.mul_(0.02)
    return model


def save_model(folder: Path, seed: int) -> None:
    """Save the model with its tokenizer, and the settings of its processor."""
    tokenizer = make_tokenizer()
    make_model(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    most = (SIDE * CELL) ** 2
    images = Qwen2VLImageProcessorPil(patch_size=CELL // 2, size={"shortest_edge": 1, "longest_edge": most})
    images.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))


def main() -> None:
    given = read_arguments(__doc__)
    save_model(given.folder / "model", given.seed)
    source, seen = random.Random(given.seed), set[str]()
    (given.folder / "pictures").mkdir(exist_ok=True)
    for split, count in ROWS.items():
        rows: list[str] = []
        while len(rows) < count:
            scene = draw_scene(source)
            if repr(scene) in seen:
                continue
            seen.add(repr(scene))
            name = f"pictures/{len(seen):05d}.png"
            asked = [shapes({**question, "cell": CELL}) for question in ask(scene)]
            [drawn] = asked[0]["images"]
            (given.folder / name).write_bytes(drawn["bytes"])
            for row in asked:
                said = {"answer": row["answer"]}
                if split == "sft":
                    said = {"completion": row["answer"] if source.random() < SURE else UNSURE}
                rows.append(json.dumps({"prompt": row["prompt"], "images": [name], **said}) + "\n")
        random.Random(given.seed).shuffle(rows)
        (given.folder / f"{split}.jsonl").write_text("".join(rows[:count]))


if __name__ == "__main__":
    main()
