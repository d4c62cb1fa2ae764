"""TRL's side of preferences.py: its RewardTrainer's loss, accuracy and gradients. Runs in TRL's own environment.

    python benchmarks/preferences_trl.py FOLDER CENTER_COEFFICIENT

Reads the folder's `model` and `pairs.jsonl`; writes `trl.json` and `trl.safetensors`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset
from safetensors.torch import save_file
from trl import RewardConfig, RewardTrainer


def main() -> None:
    folder, center = Path(sys.argv[1]), float(sys.argv[2])
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    settings = RewardConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=len(rows),
        center_rewards_coefficient=center or None,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = RewardTrainer(str(folder / "model"), args=settings, train_dataset=Dataset.from_list(rows))
    kept = [
        {name: row[name] for name in row if name in ("chosen_ids", "rejected_ids", "margin")}
        for row in trainer.train_dataset
    ]
    loss = trainer.compute_loss(trainer.model.train(), trainer.data_collator(kept))
    loss.backward()
    save_file({name: p.grad.contiguous() for name, p in trainer.model.named_parameters()}, folder / "trl.safetensors")
    result = {
        "loss": float(loss.detach().double()),
        "accuracy": trainer._metrics["train"]["accuracy"][0],
        "texts": [[row["chosen_ids"], row["rejected_ids"]] for row in kept],
    }
    (folder / "trl.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
