"""The steps that step.py measures: a model, its data and the settings of both sides, written to a folder."""

import json
import string
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from plan_gpus import MODELS, ROOT, Shape, model_config
from rollout_engines import TINY, TINY_STATES
from rollout_workloads import WORKLOADS as ROLLOUTS

from hybrid_grpo.config import TrainConfig, to_dict
from hybrid_grpo.config.checks import check_train
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.config.recipes import read_recipe
from hybrid_grpo.data.packing import token_budget
from hybrid_grpo.data.tasks.gym import gym_task
from hybrid_grpo.model.gguf import files_of
from hybrid_grpo.model.kernels.build import cache

SCRIPTS = ROOT / "training_scripts"


@dataclass(frozen=True)
class Job:
    """One GRPO step, and how often."""

    arguments: list[str]
    """Command line of `train`, without the ZeRO stage."""
    longest_prompt: int
    """In tokens."""
    lengths: list[list[int]] | None = None
    """[P][G], tokens that each completion is forced to, in the order of the data; None: they end by themselves."""

    def spec(self, stage: int, threads: int, settings: Sequence[str] = (), foreign: bool = False) -> dict[str, Any]:
        """A worker's specification: our command line at a ZeRO stage with more `settings`, and the other side's.

        Its `micro_rows` are as many completions as our budget of tokens takes when all are as long as the longest may
        be. A `foreign` side has bfloat16 without ZeRO too.
        """
        arguments = [*self.arguments, "--engine.zero_stage", str(stage or int(foreign)), *settings]
        config = parse(TrainConfig, arguments, "train").config
        check_train(config, 1)
        rows = config.rollout.prompts_per_step * config.rollout.num_generations // config.grpo.num_minibatches
        longest = self.longest_prompt + config.rollout.max_completion_tokens
        budget = token_budget(config.policy, on_gpu=torch.cuda.is_available(), gradients=True)
        fitting = min(rows, max(1, budget // longest))
        told = to_dict(config)
        told["engine"]["zero_stage"] = stage
        return {
            "arguments": arguments, "config": told, "lengths": self.lengths, "threads": threads,
            "micro_rows": next(n for n in range(fitting, 0, -1) if rows % n == 0),
        }  # fmt: skip


def _run(*command: Any) -> None:
    """Run a program of this repository; its output is shown only if it fails."""
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def letters(folder: Path, seed: int = 0, ragged: bool = False) -> Job:
    """The GRPO run of `quickstart.sh --toy`: its model after the supervised warm-up, its task and settings;
    `ragged`: with words of 3 to 24 letters, log-normal."""
    task = folder / "letters-task"
    _run(SCRIPTS / "letters_task.py", task, "--seed", seed, *(["--ragged"] if ragged else []))
    _run(
        *("-m", "hybrid_grpo", "sft", "--config", SCRIPTS / "letters_sft.yaml"),
        *("--run.dir", folder, "--run.seed", seed, "--engine.zero_stage", 0),
        *("--policy.model", task / "model", "--data.path", task / "sft.jsonl"),
    )
    arguments = [
        *("--config", str(SCRIPTS / "letters.yaml"), "--run.seed", str(seed)),
        *("--policy.model", str(folder / "letters-sft/model"), "--data.path", str(task / "train.jsonl")),
        *("--data.eval_path", str(task / "heldout.jsonl")),
        # The other side shuffles differently; the words are already in random order.
        *("--data.shuffle", "false", "--log.wandb", "disabled"),
    ]
    longest = 24 if ragged else 6
    return Job([*arguments, "--rollout.max_completion_tokens", str(longest + 2)], longest_prompt=longest + 1)


REAL = {
    "products": "gym/products,min_terms=2,max_terms=2,min_digits=1,max_digits=2",
    "letter_counting": "gym/letter_counting",
    "gsm_symbolic": "gym/gsm_symbolic",
}
"""Other problems that the model of the quickstart learns."""


def real(folder: Path, seed: int = 0, problems: str | None = None) -> Job:
    """The GRPO run of `quickstart.sh`, which has fetched the weights, on its problems or others of `REAL`. Both sides
    read them from files."""
    task = gym_task(REAL[problems] if problems else read_recipe(SCRIPTS / "quickstart.yaml")["data"]["task"])
    for split, held_out in (("train", False), ("heldout", True)):
        rows = list(islice(task.made(held_out), 4096))
        chats = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    settings = {
        "config": SCRIPTS / "quickstart.yaml",
        "run.seed": seed,
        **{"policy.dtype": "float32", "policy.lr": "2e-5", "policy.micro_batch_tokens": 1024},  # as on other CPUs
        "policy.model": files_of(str(cache() / "SmolLM2-135M-Instruct.Q4_1.gguf")),
        "data.task": "null",
        "data.path": folder / "train.jsonl",
        "data.eval_path": folder / "heldout.jsonl",
        "data.shuffle": "false",
        "rewards": "[{function: numeric_answer, kwargs: {last_number: true}}]",
        "log.wandb": "disabled",
    }
    return Job(
        [part for name, value in settings.items() for part in (f"--{name}", str(value))],
        longest_prompt=256 if problems else 40,
    )


def _of_rollout(folder: Path, name: str, shape: Shape, dtype: str = "float32", *settings: str) -> Job:
    """A workload of rollout.py, trained on."""
    workload = ROLLOUTS[name]()
    prompts = [len(ids) for ids in workload.prompts]
    arguments = _forced(folder, prompts, len(workload.lengths[0]), workload.limit, shape, dtype)
    return Job([*arguments, *settings], max(prompts), workload.lengths)


def head(folder: Path) -> Job:
    """The cost of a large vocabulary: 8 sequences of 1,024 tokens, V = 151,936, two layers, in one micro-batch."""
    arguments = _forced(folder, [64], 8, 960, {**TINY, "vocab_size": 151_936, "num_hidden_layers": 2})
    return Job([*arguments, "--policy.micro_batch_tokens", "8192"], 64, [[960] * 8])


def save_model(folder: Path, shape: Shape, dtype: str) -> None:
    """Write a random model to `folder/model`, with the tokenizer of the toy, whose letters are its first 29 tokens."""
    from transformers import AutoModelForCausalLM

    sys.path.append(str(SCRIPTS))
    from letters_task import make_tokenizer

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a large model takes a while on a CPU
        model = AutoModelForCausalLM.from_config(model_config(shape, **ids), dtype=getattr(torch, dtype))
    model.save_pretrained(folder / "model")
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # for those that train it, which are other processes
    tokenizer.save_pretrained(folder / "model")


def _forced(
    folder: Path, prompts: list[int], generations: int, limit: int, shape: Shape, dtype: str = "float32"
) -> list[str]:
    """A random model, and prompts of the given lengths in the letters of the toy."""
    save_model(folder, shape, dtype)
    random = Random(0)
    rows = [{"prompt": "".join(random.choices(string.ascii_lowercase, k=n))} for n in prompts]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "policy.model": folder / "model", "policy.dtype": dtype, "policy.lr": "1e-5",
        "data.path": folder / "data.jsonl", "data.shuffle": "false", "rollout.prompts_per_step": len(prompts),
        "rollout.num_generations": generations, "rollout.max_completion_tokens": limit, "rollout.ignore_eos": "true",
        "rewards": json.dumps([{"function": f"{ROOT / 'benchmarks/step_rewards.py'}:scattered"}]),
        "log.wandb": "disabled",
    }  # fmt: skip
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


JOBS: dict[str, Callable[[Path], Job]] = {
    "letters": letters,
    "real": real,
    "ragged": lambda folder: _of_rollout(folder, "ragged", TINY),
    "ragged_states": lambda folder: _of_rollout(folder, "ragged", TINY_STATES),
    "head": head,
    "gpu_1.5b": lambda folder: _of_rollout(
        folder, "gpu_ragged", MODELS["Qwen2.5-1.5B"], "bfloat16", "--policy.gradient_checkpointing", "true"
    ),
    "toy": lambda folder: _of_rollout(folder, "toy", {**TINY, "num_hidden_layers": 1}),
}
