"""TRL's side of step.py: its GRPOTrainer with our settings, one step a command. Runs in TRL's own environment.

    python benchmarks/step_trl.py SPEC
    deepspeed --num_accelerators 1 benchmarks/step_trl.py SPEC      # stage 3

The trainer's own loop runs; a callback pauses it between two steps. So a step is everything from one rollout to the
next, including the drawing of prompts and all optimizer steps. Only the reward functions are imported from this
repository.

To force lengths, a logits processor writes one column: end-of-sequence is impossible before a completion's length and
certain at it. The rest is TRL's: `generate()` runs until the longest row is done, and what follows the end of a
sequence is masked.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# For the reward functions of this repository, and nothing else.
sys.path.append(str(Path(__file__).parent.parent))

import torch
from datasets import Dataset
from step_worker import Measurement, Positions, Stopwatch, answer, commands, flat, shortened
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from hybrid_grpo.config import RewardConfig
from hybrid_grpo.rewards.functions import load_function


class Lengths(LogitsProcessor):
    """Ends every row at its length, in the order of the data."""

    def __init__(self, eos: int) -> None:
        self.eos = eos
        self.lengths_B = torch.empty(0)
        self.prompt_width = 0
        self.seconds = 0.0

    def start(self, lengths: list[list[int]]) -> None:
        """Force these lengths in the next call of `generate`."""
        self.lengths_B = torch.tensor(flat(lengths))
        self.prompt_width = -1
        self.seconds = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        start = time.perf_counter()
        if self.prompt_width < 0:
            self.prompt_width = input_ids.shape[1]
        ends_B = self.lengths_B.to(scores.device) == input_ids.shape[1] - self.prompt_width + 1
        scores[:, self.eos] = torch.where(ends_B, 1e9, -torch.inf)
        self.seconds += time.perf_counter() - start
        return scores


def reward_functions(configs: list[dict[str, Any]], means: list[float]) -> list[Callable[..., Any]]:
    """Our rewards in TRL's convention; each call appends its weighted mean to `means`."""

    def wrap(config: RewardConfig) -> Callable[..., Any]:
        reward = load_function(config, "rewards")

        def function(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> Any:
            inputs = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
            # TRL passes more than columns: its state, and logging functions.
            inputs |= {name: values for name, values in columns.items() if isinstance(values, list)}
            values = reward(inputs)
            means.append(config.weight * sum(values) / len(values))
            return values

        function.__name__ = reward.name
        return function

    return [wrap(RewardConfig(**config)) for config in configs]


def settings(spec: dict[str, Any]) -> GRPOConfig:
    """Our settings as TRL's."""
    config = spec["config"]
    policy, rollout, grpo = config["policy"], config["rollout"], config["grpo"]
    rows = rollout["prompts_per_step"] * rollout["num_generations"]
    stage = config["engine"]["zero_stage"]
    zero = {
        "zero_optimization": {"stage": stage},
        **dict.fromkeys(("gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"), "auto"),
        "gradient_accumulation_steps": "auto",
        "steps_per_print": 10**9,
    }
    # Ours may name a kernel that transformers does not know; then its own default.
    attention = policy["attn_implementation"]
    attention = attention if attention in ("eager", "flash_attention_2") else "sdpa"
    return GRPOConfig(
        output_dir=str(Path(sys.argv[-1]).parent / "trl"),
        max_steps=10**6,
        seed=config["run"]["seed"],
        use_cpu=not torch.cuda.is_available(),
        # TRL's own default: float32 weights, products in bfloat16.
        bf16=policy["dtype"] == "bfloat16",
        model_init_kwargs={"dtype": "float32", "attn_implementation": attention},
        **{name: policy[name] for name in ("gradient_checkpointing", "weight_decay", "max_grad_norm")},
        **{name: rollout[name] for name in ("num_generations", "temperature", "top_k", "top_p", "repetition_penalty")},
        **{name: grpo[name] for name in ("loss_type", "scale_rewards", "beta", "num_iterations")},
        deepspeed=zero if stage else None,
        per_device_train_batch_size=spec["micro_rows"],
        gradient_accumulation_steps=rows // spec["micro_rows"] // grpo["num_minibatches"],
        steps_per_generation=rows // spec["micro_rows"],
        learning_rate=policy["lr"],
        lr_scheduler_type="constant",
        adam_beta1=policy["betas"][0],
        adam_beta2=policy["betas"][1],
        max_completion_length=rollout["max_completion_tokens"],
        epsilon=grpo["epsilon_low"],
        epsilon_high=grpo["epsilon_high"],
        reward_weights=[reward["weight"] for reward in config["rewards"]],
        shuffle_dataset=config["data"]["shuffle"],
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class Side(TrainerCallback):
    """Pauses the trainer between two steps, and measures them."""

    def __init__(self, spec: dict[str, Any], trainer: GRPOTrainer, means: list[float]) -> None:
        self.trainer = trainer
        self.means = means
        self.learning_rates = spec.get("learning_rates")
        grpo = spec["config"]["grpo"]
        self.updates = grpo["num_iterations"] * grpo["num_minibatches"]
        self.given = spec["lengths"]
        self.lengths: list[list[int]] | None = None
        self.commands = commands()
        self.measurement: Measurement | None = None
        self.watch = Stopwatch()
        self.processor = Lengths(trainer.processing_class.eos_token_id)
        self.tokens = (0, 0)
        self.wrap_generate(trainer)
        self.wrap_scoring(trainer)
        self.watch.watch(trainer, "_generate", "generate")
        self.watch.watch(trainer, "_calculate_rewards", "reward")
        self.watch.watch(trainer, "training_step", "forward")
        self.watch.watch(trainer.accelerator, "clip_grad_norm_", "optimizer")

    def wrap_generate(self, trainer: GRPOTrainer) -> None:
        model = trainer.accelerator.unwrap_model(trainer.model)
        plain = model.generate

        def generate(*args: Any, **kwargs: Any) -> Tensor:
            return plain(*args, **kwargs, logits_processor=LogitsProcessorList([self.processor]))

        if self.given is not None:
            model.generate = generate

    def wrap_scoring(self, trainer: GRPOTrainer) -> None:
        score, logprobs = trainer._generate_and_score_completions, trainer._get_per_token_logps_and_entropies

        def scored(inputs: Any) -> Any:
            # Everything without a stage of its own (padding, advantages, metrics) is `rest`.
            with self.watch.stage("rest"):
                batch = score(inputs)
            generated = int(batch["completion_mask"].sum())
            self.tokens = (generated, generated + int(batch["prompt_mask"].sum()))
            produced = batch["completion_mask"].sum(1).tolist()
            assert self.lengths is None or produced == flat(self.lengths), "completions have other lengths"
            return batch

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.watch.stage("forward" if torch.is_grad_enabled() else "reference"):
                return logprobs(*args, **kwargs)

        trainer._generate_and_score_completions = scored
        trainer._get_per_token_logps_and_entropies = watched

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wrapped = self.trainer.accelerator
        self.positions = Positions(wrapped.unwrap_model(self.trainer.model))
        self.watch.watch(wrapped, "backward", "backward")
        deepspeed = self.trainer.model_wrapped if args.deepspeed else None
        self.watch.watch(deepspeed or kwargs["optimizer"], "step", "optimizer")
        answer("ready")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.learning_rates is not None:
            for group in kwargs["optimizer"].param_groups:
                group["lr"] = self.learning_rates[state.global_step]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Between two rollouts: report the last step, and wait."""
        if state.global_step % self.updates:
            return
        if self.measurement is not None:
            self.watch.seconds.pop("rest", None)
            generated, trained = self.tokens
            result = self.measurement.end(
                {"reference": 0.0, **self.watch.seconds},
                generated=generated,
                trained=trained,
                positions=self.positions.count,
                reward=sum(self.means),
            )
            answer({**result, "forcing_s": self.processor.seconds})
            self.measurement = None
        for command in self.commands:
            if "save" in command:
                self.trainer.accelerator.unwrap_model(self.trainer.model).save_pretrained(command["save"])
                self.trainer.processing_class.save_pretrained(command["save"])
                answer("saved")
                continue
            if self.given is not None:
                self.lengths = shortened(self.given, command["shorten"])
                self.processor.start(self.lengths)
            self.watch.seconds.clear()
            self.means.clear()
            self.positions.count = 0
            self.measurement = Measurement()
            return
        sys.stdout.flush()
        os._exit(0)


def main() -> None:
    # The launcher inserts the rank as the first argument.
    spec = json.loads(Path(sys.argv[-1]).read_text())
    rows = [json.loads(line) for line in Path(spec["config"]["data"]["path"]).read_text().splitlines()]
    torch.set_num_threads(spec["threads"])
    means: list[float] = []
    trainer = GRPOTrainer(
        model=spec["config"]["policy"]["model"],
        reward_funcs=reward_functions(spec["config"]["rewards"], means),
        args=settings(spec),
        train_dataset=Dataset.from_list(rows),
    )
    trainer.add_callback(Side(spec, trainer, means))
    trainer.train()


if __name__ == "__main__":
    main()
