"""TRL's side of turns_beside.py: its GRPOTrainer with a tool, on the look-up task. Runs in TRL's own environment.

    python benchmarks/turns_trl.py SPEC

The SPEC is a JSON file with our settings (`config`), `steps`, `tool_tokens` (observation tokens of template and tool
between two turns) and `folder`, for the trained model and `trl.json`, which has the seconds and the mean reward of
every step.

TRL reads calls by the tokenizer's `response_template`, which is set to TRL's for Qwen3, since the format is the same.
Its `max_completion_length` includes observation tokens, so it is the sum of our limits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import late_lookup
from datasets import Dataset
from step_trl import reward_functions, settings
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_template


class Clock(TrainerCallback):
    """Records when training begins and when its steps end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    config, folder = spec["config"], Path(spec["folder"])
    rollout, policy = config["rollout"], config["policy"]
    rows = [json.loads(line) for line in Path(config["data"]["path"]).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(policy["model"])
    tokenizer.response_template = qwen3_template
    answers = rollout["max_turns"] - 1
    means: list[float] = []
    clock = Clock()
    trainer = GRPOTrainer(
        model=policy["model"],
        processing_class=tokenizer,
        reward_funcs=reward_functions(config["rewards"], means),
        args=settings(
            spec,
            deepspeed=None,
            max_steps=spec["steps"],
            lr_scheduler_type=policy["lr_schedule"],
            warmup_steps=policy["warmup_steps"],
            max_completion_length=rollout["max_completion_tokens"] + answers * spec["tool_tokens"],
            max_tool_calling_iterations=answers,
        ),
        train_dataset=Dataset.from_list(rows),
        tools=[late_lookup.look_up if "TOOL_S" in os.environ else late_lookup.lookup_tools.look_up],
        callbacks=[clock],
    )
    trainer.train()
    trainer.save_model(str(folder / "model"))
    # Restored, so that hybrid-grpo eval reads the calls of both models in the same format.
    AutoTokenizer.from_pretrained(policy["model"]).save_pretrained(folder / "model")
    steps = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    (folder / "trl.json").write_text(json.dumps({"steps_s": steps, "rewards": means}))


if __name__ == "__main__":
    main()
