"""The reference policy: the starting weights, in host memory, scored once per rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_grpo import engine as engines
from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.data.batch import MicroBatch
from hybrid_grpo.loading import load_model
from hybrid_grpo.logprobs import LogprobModel


class Reference:
    """A frozen copy of the starting policy, sharded over the ranks and offloaded to host memory (ZeRO-3)."""

    def __init__(self, policy: PolicyConfig) -> None:
        config = engines.reference_config(policy)
        with engines.sharded_loading(config):
            model = load_model(policy)
        self.engine = engines.Frozen(LogprobModel(model), config)

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
            logp_N, _ = self.engine(micro.input_ids_bS, micro.target_mask_bS, temperature)
            if micro.rows:
                ref_logp_BT[micro.rows, : micro.mask_bT.shape[1]] = micro.unflatten(logp_N)
        return ref_logp_BT
