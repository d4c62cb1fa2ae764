"""Rewards for tests: of functions written in a test, called here and now; or in processes, as a run has them."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import psutil

from hybrid_grpo.config import RewardConfig, ScoringConfig
from hybrid_grpo.data.batch import Completion, Prompt, RewardStatus, Scores
from hybrid_grpo.distributed.workers.calls import call_inline
from hybrid_grpo.rewards.functions import bind
from hybrid_grpo.rewards.loader import Reward, load_rewards
from hybrid_grpo.rewards.scorer import Rewards

ALL = 1 << 20
"""A `batch_size` that gives a function all rows at once."""


def inline(function: Callable[..., Any], **fields: Any) -> Reward:
    """A reward of a Python function, given all rows at once; `fields` are of its configuration."""
    name = fields.pop("name", function.__name__)
    config = RewardConfig(function=f"test:{name}", name=name, **{"batch_size": ALL, **fields})
    bound = bind(function, config, "rewards[0]")
    return Reward(name, config.weight, frozenset(config.kwargs), bound.interface, partial(call_inline, bound.reply))


def isolated(*configs: RewardConfig, **scoring: Any) -> Rewards:
    """Rewards as a run has them, with two workers unless `scoring` says otherwise."""
    settings = ScoringConfig(**{"workers": 2, **scoring})
    return Rewards(load_rewards(configs, settings), settings)


def completion(text: str) -> Completion:
    """A completion with a token for every character."""
    return Completion(list(map(ord, text)), [0.0] * len(text), "stop", text)


def rows(*texts: str, chat: bool = False, **columns: Sequence[Any]) -> tuple[list[Prompt], list[Completion]]:
    """Prompts p0, p1, ..., with a completion each."""
    prompts = [
        Prompt(
            id=100 + i,
            text=[{"role": "user", "content": f"p{i}"}] if chat else f"p{i}",
            token_ids=[1],
            columns={name: values[i] for name, values in columns.items()},
        )
        for i in range(len(texts))
    ]
    return prompts, [completion(text) for text in texts]


def in_time(holds: Callable[[], Any], seconds: float = 30.0) -> bool:
    """Whether it comes to hold, on a machine that may stand still for a while."""
    deadline = time.monotonic() + seconds
    while not (held := bool(holds())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return held


def command_lines(processes: Iterable[psutil.Process] | None = None) -> list[str]:
    """Of these processes, or of all of this machine; those that have ended in the meantime are left out."""
    lines = []
    for process in psutil.process_iter() if processes is None else processes:
        with suppress(psutil.Error, OSError):
            lines.append(" ".join(process.cmdline()))
    return lines


def statuses(scores: Scores, name: str) -> list[str]:
    """What came of a function, row by row: scored, not_applicable, failed or timed_out."""
    return [RewardStatus(status).name.lower() for status in scores.status[name].tolist()]
