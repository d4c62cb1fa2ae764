"""Checks that the disk has room for what a run will keep, and the host memory for the copy of a checkpoint."""

import resource
import shutil
from pathlib import Path

import psutil
import torch

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.run import CheckpointConfig
from hybrid_grpo.distributed.hardware import host_free_bytes
from hybrid_grpo.distributed.ranks import local_ranks
from hybrid_grpo.model.gathered_weights import whole_shape
from hybrid_grpo.run.folder import say
from hybrid_grpo.run.stage import Stage

_STATE_BYTES = 12
"""Bytes of a trained weight in a checkpoint: its float32 value and the two moments of Adam."""


def check_space(folder: Path, config: CheckpointConfig, stage: Stage, models: int = 1) -> int:
    """Check the disk space, print what the run will take of it, and return the bytes of a checkpoint over all ranks.
    Raise UserError if the disk lacks room for the kept checkpoints, one more being written, and `models`
    exported models. Rollouts and metrics are small by comparison, and not counted."""
    # Parameters, each with its number of elements over all ranks.
    sizes = [(p, whole_shape(p).numel()) for p in stage.policy.engine.engine.module.parameters()]
    model = sum(size for _, size in sizes) * getattr(torch, stage.policy.config.dtype).itemsize
    trained = sum(size for p, size in sizes if p.requires_grad)
    checkpoint = _STATE_BYTES * trained
    if stage.shards is not None:
        checkpoint += 4 * sum(size for _, size in sizes) if stage.shards_are_float32 else model
    count = config.keep + 1 if config.is_on else 0
    # A resumed run replaces the checkpoints that it has already written.
    here = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*") if path.is_file())
    needed, free = count * checkpoint + models * model, shutil.disk_usage(folder).free + here
    parts = (
        f"{count} checkpoints of {checkpoint / 1e9:.3g} GB (checkpoint.keep {config.keep}, and one while it is written)"
        f" and {'the model' if models == 1 else f'{models} models'} of {model / 1e9:.3g} GB"
    )
    refuse(
        free < needed,
        f"run.dir: the disk of {folder} has {free / 1e9:.3g} GB free, and the run needs {needed / 1e9:.3g}: {parts}:"
        " make room, lower checkpoint.keep, or use another run.dir",
    )
    say(f"disk: at most {needed / 1e9:.3g} of {free / 1e9:.3g} GB: {parts}")
    return checkpoint


def has_memory(bytes_: int) -> bool:
    """Return whether this rank's share of host memory holds so many bytes, and what the process may need again."""
    given_back = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - psutil.Process().memory_info().rss
    return bytes_ + max(0, given_back) <= host_free_bytes() // local_ranks()
