"""The reference policy: the starting weights or later ones of the policy, in host memory, scored once per rollout."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hybrid_grpo import engine as engines
from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import MicroBatch
from hybrid_grpo.distributed import rank
from hybrid_grpo.generation.rollout import training_attention
from hybrid_grpo.model.loading import load_model
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.lora import Adapters


class Reference:
    """A frozen copy of the policy, sharded over the ranks and offloaded to host memory (ZeRO-3)."""

    def __init__(self, policy: PolicyConfig) -> None:
        def read() -> LogprobModel:
            return LogprobModel(load_model(policy, training_attention(policy)))

        self.engine = engines.Frozen.of(read, policy.dtype)

    def logprobs(self, batches: list[MicroBatch], shape: tuple[int, int], temperature: float) -> Tensor:
        """Score every completion; collective, each rank with the same number of micro-batches.

        Args:
            batches: micro-batches that cover all rows.
            shape: (B, T) of the result.
            temperature: that of sampling.

        Returns:
            ref_logp_BT, float32, 0 on padding.
        """
        device = batches[0].input_ids_bS.device
        ref_logp_BT = torch.zeros(shape, dtype=torch.float32, device=device)
        for micro in batches:
            logp_N = self._score(micro, temperature)
            if micro.rows:
                ref_logp_BT[micro.rows, : micro.mask_bT.shape[1]] = micro.unflatten(logp_N)
        return ref_logp_BT

    def _score(self, micro: MicroBatch, temperature: float) -> Tensor:
        """logp_N of the tokens under the mask; collective."""
        logp_N, _ = self.engine(*micro.inputs, temperature)
        return logp_N

    def refresh(self, policy: engines.Engine, mix: float) -> None:
        """Make the weights `mix` of the policy's and the rest of what they were (iterative GRPO: DeepSeekMath,
        arXiv:2402.03300, algorithm 1, with mix 1)."""
        self.engine.blend(policy, mix)

    def save(self, folder: Path) -> None:
        """Write this rank's weights into a checkpoint's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.engine.save(_shards(folder))

    def load(self, folder: Path) -> None:
        """Go on with the weights of a checkpoint.

        Raises:
            UserError: it holds none for this rank.
        """
        if not _shards(folder).is_file():
            raise UserError(
                f"run.resume: checkpoint {folder} holds no reference for rank {rank()}: it was written with another"
                " number of ranks, or with grpo.ref_every 0: resume with the same"
            )
        self.engine.load(_shards(folder))


class UnadaptedReference(Reference):
    """The model under a policy's adapters, which it started as: the policy's own engine without them, and no second
    copy of the weights. It stays what it is: nothing refreshes, saves or loads it."""

    def __init__(self, policy: engines.Engine, adapters: Adapters) -> None:
        self._policy = policy
        self._adapters = adapters

    @torch.no_grad()
    def _score(self, micro: MicroBatch, temperature: float) -> Tensor:
        with self._adapters.off():
            logp_N, _ = self._policy(*micro.inputs, temperature)
        return logp_N


def _shards(folder: Path) -> Path:
    return folder / f"reference_rank_{rank()}.pt"
