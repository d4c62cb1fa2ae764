"""The frozen reference of a policy, to which the KL term keeps it close."""

from pathlib import Path

import torch
from torch import Tensor

from hybrid_grpo import engine as engines
from hybrid_grpo.config import EngineConfig, PolicyConfig
from hybrid_grpo.data.batch import MicroBatch
from hybrid_grpo.data.measuring import measured
from hybrid_grpo.data.pictures import ImageStore, sight_of
from hybrid_grpo.distributed import shards, tensor_files
from hybrid_grpo.distributed.ranks import rank
from hybrid_grpo.model.loading import load_model, training_attention
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.lora import Adapters
from hybrid_grpo.model.routing import routed
from hybrid_grpo.model.sight import VisionEncoder
from hybrid_grpo.policy import Policy

_TOWER = "reference_tower.pt"
"""Name of the file of a reference's own tower in a checkpoint."""


class Reference:
    """The reference policy: a frozen copy of the starting weights, or of later ones, sharded over the ranks in host
    memory (ZeRO-3). For `vocabulary` see `Policy`."""

    def __init__(
        self, policy: PolicyConfig, engine: EngineConfig, album: ImageStore | None = None, vocabulary: int | None = None
    ) -> None:
        def read() -> LogprobModel:
            return LogprobModel(load_model(policy, training_attention(policy)), vocabulary)

        self.engine = engines.OffloadedModel(read, policy.dtype, engine.fetching)
        self._sight = _own_sight(album, policy, self.engine.device)

    def logprobs(self, batches: list[MicroBatch], shape: tuple[int, int], temperature: float) -> Tensor:
        """ref_logp_BT of the rows in `batches`; see `measured`. Collective."""
        return measured(self.engine, _seen_by(self._sight, batches), shape, temperature)[0]

    def refresh(self, policy: Policy, mix: float) -> None:
        """Set the weights to `mix` times the policy's weights plus (1 - `mix`) times their present values, which are
        kept in float32; `mix` 1 is iterative GRPO (DeepSeekMath, arXiv:2402.03300, algorithm 1)."""
        self.engine.blend(policy.engine, mix)
        if self._sight is not None and policy.tower is not None:
            self._sight.blend(policy.tower.state(), mix)

    def save(self, folder: Path) -> None:
        """Write this rank's shards into a checkpoint's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.engine.save(folder)
        if self._sight is not None and rank() == 0:
            tensor_files.write(self._sight.saved(), folder / _TOWER)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on any number of ranks. Raises UserError if there is nothing (grpo.ref_every 0)."""
        self.engine.load(folder)
        if self._sight is not None:
            self._sight.restore(shards.read_file(folder / _TOWER))


def _own_sight(album: ImageStore | None, policy: PolicyConfig, device: torch.device) -> VisionEncoder | None:
    """Return the sight of a reference; None if the policy's tower, which is frozen, sees for it too."""
    return sight_of(album, policy, device) if policy.vision == "trained" else None


def _seen_by(sight: VisionEncoder | None, batches: list[MicroBatch]) -> list[MicroBatch]:
    return batches if sight is None else [micro.seen_by(sight) for micro in batches]


class UnadaptedReference(Reference):
    """The reference of a policy with adapters: its engine with the adapters off, which is never refreshed or saved."""

    def __init__(self, policy: Policy, adapters: Adapters, album: ImageStore | None = None) -> None:
        self._policy, self._adapters = policy.engine, adapters
        self._sight = _own_sight(album, policy.config, policy.engine.device)

    def logprobs(self, batches: list[MicroBatch], shape: tuple[int, int], temperature: float) -> Tensor:
        """See `Reference.logprobs`."""
        with self._adapters.off(), routed(None):
            return measured(self._policy, _seen_by(self._sight, batches), shape, temperature)[0]
