"""The common part of both sides of step.py: take commands, divide a step's time into stages, count its tokens.

Imported in two environments; knows neither trainer.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rollout import memory_gb, reset_peak

MARK = "step.py: "
"""The prefix of a worker's answers; its other output is for people."""


def answer(value: Any) -> None:
    """Send the outcome of a command to step.py."""
    print(f"{MARK}{json.dumps(value)}", flush=True)


def commands() -> Iterator[dict[str, Any]]:
    """step.py's commands, until there are no more; the process sleeps in between."""
    for line in sys.stdin:
        yield json.loads(line)


class Stopwatch:
    """Seconds by stage; a nested stage does not count in the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def _turn(self) -> None:
        if torch.cuda.is_available():
            # GPU work that a stage has launched belongs to it, although the host does not wait for it.
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time in the block belongs to this stage."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def watch(self, owner: Any, method: str, name: str) -> None:
        """From now on, calls of this object's method belong to this stage."""
        inner = getattr(owner, method)

        def outer(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return inner(*args, **kwargs)

        setattr(owner, method, outer)


class Positions:
    """Counts the token positions, padding included, that a model is trained on."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        embedding = next(module for module in model.modules() if isinstance(module, torch.nn.Embedding))
        embedding.register_forward_pre_hook(self._add)

    def _add(self, _: Any, args: tuple[torch.Tensor]) -> None:
        if torch.is_grad_enabled():
            self.count += args[0].numel()


class Measurement:
    """One step from start to end."""

    def __init__(self) -> None:
        reset_peak()
        self.loaded_gb = memory_gb("VmRSS")
        self.on_gpu = torch.cuda.is_available()
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.start = time.perf_counter()

    def end(
        self, stages: dict[str, float], *, generated: int, trained: int, positions: int, reward: float
    ) -> dict[str, Any]:
        """The numbers of the step.

        `generated` are tokens of completions, `trained` those of the prompts too, `positions` those of the training
        forwards with padding, `reward` is the mean; what is left of the step beside its `stages` is `rest`.
        """
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.start
        peak = memory_gb("VmHWM")
        of_gpu = {"peak_gpu_gb": torch.cuda.max_memory_allocated() / 1e9} if self.on_gpu else {}
        return {
            "seconds": seconds, "stages": {**stages, "rest": seconds - sum(stages.values())},
            "generated_tokens": generated, "trained_tokens": trained, "computed_over_real": positions / trained,
            "peak_rss_gb": peak, "increment_gb": peak - self.loaded_gb, "reward": reward, **of_gpu,
        }  # fmt: skip


def shortened(lengths: list[list[int]], factor: int) -> list[list[int]]:
    """Forced lengths, shorter by a factor, rounded up."""
    return [[-(-n // factor) for n in group] for group in lengths]


def flat(lengths: list[list[int]]) -> list[int]:
    """The length of every row, group after group."""
    return [n for group in lengths for n in group]
