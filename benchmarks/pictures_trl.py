"""TRL's side of pictures.py: its GRPOTrainer, with the same model, rows, rewards and settings."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Times(TrainerCallback):
    """The seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def kinds(completions: list[Any], **_: Any) -> list[float]:
    return [len(set(str(completion))) / 30 for completion in completions]


def main() -> None:
    task = json.loads(sys.argv[1])
    folder = Path(task["folder"])
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
    images = [[Image.open(folder / name).convert("RGB") for name in row["images"]] for row in rows]
    data = data.add_column(
        "images", [[{"path": str(folder / name), "bytes": None} for name in r["images"]] for r in rows]
    )
    from datasets import Image as Picture
    from datasets import List

    data = data.cast_column("images", List(Picture()))
    del images
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=task["steps"],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=task["prompts"] * task["generations"],
        num_generations=task["generations"],
        max_completion_length=task["tokens"],
        generation_kwargs={"min_new_tokens": task["tokens"]},
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        beta=0.0,
        shuffle_dataset=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        gradient_checkpointing=False,
    )
    times = Times()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[kinds],
        args=config,
        train_dataset=data,
        processing_class=AutoProcessor.from_pretrained(folder / "model"),
        callbacks=[times],
    )
    trainer.train()
    (folder / "trl.json").write_text(json.dumps(times.seconds))


if __name__ == "__main__":
    main()
