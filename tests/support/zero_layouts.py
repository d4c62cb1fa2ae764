"""Weights as DeepSpeed lays them out over ranks at every ZeRO stage, without DeepSpeed; see rank_threads.py."""

from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_grpo.distributed.ranks import rank, world_size

SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 2), "d": (1,)}
COUNTS = {name: prod(shape) for name, shape in SHAPES.items()}
GROUPS = [["a", "b"], ["c", "d"]]
Whole = dict[str, Tensor]


def weights(start: float) -> Whole:
    """All weights, of which no two numbers are equal."""
    return {
        name: start + 100 * k + torch.arange(float(prod(of))).view(of) for k, (name, of) in enumerate(SHAPES.items())
    }


class Sharded:
    """This rank's part of weights. At stage 3 every weight is cut by itself, at stages 1 and 2 a row of a group,
    which at 2 is in another order; at 0 each rank has all. What is cut is padded to a multiple of the ranks.

    Attributes:
        flats: the float32 tensors that `optimizer` updates.
        used: what the model computes with, which follows `flats` when DeepSpeed is told to.
        told: what DeepSpeed was told.
    """

    def __init__(self, stage: int, whole: Whole, pad: float = -1.0) -> None:
        self.stage, self.told, self._groups = stage, list[Any](), [g[:: -1 if stage == 2 else 1] for g in GROUPS]
        self.module = nn.ParameterDict({name: nn.Parameter(of.clone()) for name, of in whole.items()})
        self.module["frozen"] = nn.Parameter(torch.ones(3), requires_grad=False)
        self.flats = list(self.module.parameters())[:-1] if stage == 0 else self.split(whole, pad)
        self.used = [flat.clone() for flat in self.flats]
        inner = torch.optim.AdamW([nn.Parameter(flat) for flat in self.flats] if stage else self.flats)
        self.flats = [flat.data for flat in (inner.param_groups[0]["params"])]
        self.inner, self.keys = inner, inner.param_groups[0]["params"]
        rows = [[self.module[n] for n in names] for names in self._groups]
        self.optimizer: Any = inner if stage == 0 else SimpleNamespace(optimizer=inner)
        if stage == 3:
            for name, parameter in list(self.module.named_parameters())[:-1]:
                parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()  # type: ignore[attr-defined]
                padded = F.pad(whole[name].flatten(), (0, -COUNTS[name] % world_size()), value=pad)
                parameter.ds_tensor = padded.chunk(world_size())[rank()].clone()  # type: ignore[attr-defined]
                parameter.ds_tensor.ds_numel = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            kept = SimpleNamespace(partition=lambda some: self.told.append("partition"))
            vars(self.optimizer).update(
                {
                    **{"fp32_partitioned_groups_flat": self.keys, "fp16_groups": rows, "persistent_parameters": [kept]},
                    "_reassign_or_swap_out_partitioned_parameters": self._follow,
                    "checkpoint_event_prologue": lambda: self.told.append("prologue"),
                    "checkpoint_event_epilogue": lambda: self.told.append("epilogue"),
                }
            )
        elif stage:
            counts = [[COUNTS[name] for name in names] for names in self._groups]
            vars(self.optimizer).update(
                {
                    **{"single_partition_of_fp32_groups": self.keys, "round_robin_bit16_groups": rows},
                    "round_robin_bit16_offsets": [[sum(of[:k]) for k in range(len(of))] for of in counts],
                    "update_lp_params": lambda: [self._follow(group) for group in range(len(rows))],
                }
            )

    def _follow(self, group: int) -> None:
        self.told.append(group)
        self.used[group] = self.flats[group].clone()

    def split(self, whole: Whole, pad: float) -> list[Tensor]:
        """This rank's flat tensors of these weights."""
        if self.stage == 0:
            return [of.clone() for of in whole.values()]
        flats = []
        for names in self._groups:
            parts = [whole[name].flatten() for name in names]
            rows = parts if self.stage == 3 else [torch.cat(parts)]
            cut = [F.pad(row, (0, -len(row) % world_size()), value=pad).chunk(world_size())[rank()] for row in rows]
            flats.append(torch.cat(cut))
        return flats
