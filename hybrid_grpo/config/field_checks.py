"""What a single setting must not be: a number out of its bounds, a name that is none, a file that is not there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hybrid_grpo.config.errors import refuse

_MAY_BE_EMPTY_TEXT = {"policy.model", "data.path", "data.eval_path", "data.system_prompt", "run.name", "eval.outcome"}
"""Empty text means something, or is refused in words of its own."""
_POSITIVE = {
    "run.steps", "policy.lr", "policy.max_grad_norm", "policy.micro_batch_tokens", "data.max_prompt_tokens",
    "rollout.prompts_per_step", "rollout.num_generations", "rollout.max_completion_tokens",
    "rollout.repetition_penalty", "rollout.max_slots", "rollout.prefill_tokens", "lora.alpha",
    "grpo.num_iterations", "grpo.num_minibatches", "grpo.epsilon_low", "grpo.epsilon_high", "grpo.kl_horizon",
    "grpo.overlong_penalty", "grpo.max_resamples", "curriculum.min_tries",
    "curriculum.half_life", "checkpoint.keep",
    "sft.batch_size", "sft.max_completion_tokens", "log.parity_alarm", "log.heldout_alarm",
    "scoring.memory_gb", "scoring.max_wait_s",
}  # fmt: skip
_NOT_NEGATIVE = {
    "run.seed", "policy.warmup_steps", "policy.weight_decay", "rollout.min_completion_tokens", "rollout.temperature",
    "rollout.top_k", "lora.rank", "grpo.beta", "grpo.entropy_coef", "grpo.overlong_buffer", "grpo.ref_every",
    "eval.every", "checkpoint.every", "log.rollouts_every", "scoring.workers", "scoring.max_failed_frac",
}  # fmt: skip


def check_fields(section: str, values: object) -> None:
    """Numbers that have a bound, and texts that must not be empty, of a section of the configuration."""
    for name, value in vars(values).items():
        path = f"{section}.{name}"
        refuse(path in _POSITIVE and value is not None and value <= 0, f"{path} {value} must be greater than 0")
        refuse(path in _NOT_NEGATIVE and value < 0, f"{path} {value} must be 0 or greater")
        refuse(value == "" and path not in _MAY_BE_EMPTY_TEXT, f"{path} is empty: give a value or take it out")


def check_name(setting: str, name: str, why: str) -> None:
    """A name of a file, folder or metric; `why` ends the message."""
    refuse(
        not re.fullmatch(r"[\w.][\w.\-]{0,127}", name) or name.strip(".") == "",
        f"{setting} {name!r} must be at most 128 letters, digits, '.', '_' or '-', without '-' in front: {why}",
    )


def check_source(name: str, source: str) -> None:
    """Data in a file or folder, or by a hub name."""
    refuse(not source, f"{name} is not set: give a JSONL or parquet file, a dataset folder or a hub name")
    if looks_like_path(source):
        refuse(not Path(source).exists(), f"{name} {source}: there is no such file or folder")
        refuse(Path(source).is_file() and Path(source).stat().st_size == 0, f"{name} {source} is empty")


def looks_like_path(name: str) -> bool:
    """A hub name is `name` or `owner/name`; anything that exists, or could not be one, is a path."""
    return (
        os.path.exists(name)
        or not re.fullmatch(r"[\w\-][\w.\-]*(/[\w.\-]+)?", name)
        or bool(re.search(r"\.(jsonl?|parquet|csv|txt|yaml)$", name))
    )


def check_output(setting: str, output: str, what: str, source: str) -> None:
    """A file to write, `-` for standard output; `what` is in the `source`, which it must not replace."""
    if output == "-":
        return
    path = Path(output)
    refuse(path.is_dir(), f"{setting} {path} is a folder: give a file")
    refuse(not path.parent.is_dir(), f"{setting} {path}: there is no folder {path.parent}")
    refuse(
        path.exists() and os.path.exists(source) and path.samefile(source),
        f"{setting} {path} would replace {what}: give another file",
    )
