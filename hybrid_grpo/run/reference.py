"""The frozen reference of a policy, to which the KL term keeps it close."""

from torch import Tensor

from hybrid_grpo import engine as engines
from hybrid_grpo.config import EngineConfig, PolicyConfig
from hybrid_grpo.data.batch import MicroBatch, measured
from hybrid_grpo.model.loading import load_model, training_attention
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.lora import Adapters
from hybrid_grpo.model.routing import routed
from hybrid_grpo.policy import Policy


class Reference:
    """The reference policy: a frozen copy of the starting weights, or of later ones, sharded over the ranks (ZeRO-3) in
    host memory, or with `on_device` in the GPUs'. For `vocabulary` see `Policy`."""

    def __init__(
        self, policy: PolicyConfig, engine: EngineConfig, vocabulary: int | None = None, *, on_device: bool = False
    ) -> None:
        def read() -> LogprobModel:
            return LogprobModel(load_model(policy, training_attention(policy)), vocabulary)

        fetching = engine.fetching | ({"offload_param": {"device": "none"}} if on_device else {})
        self.engine = engines.OffloadedModel(read, policy.dtype, fetching)

    def logprobs(self, batches: list[MicroBatch], shape: tuple[int, int], temperature: float) -> Tensor:
        """ref_logp_BT of the rows in `batches`; see `measured`. Collective."""
        return measured(self.engine, batches, shape, temperature)[0]

    def refresh(self, policy: Policy, mix: float) -> None:
        """Set the weights to `mix` times the policy's weights plus (1 - `mix`) times their present values, which are
        kept in float32; `mix` 1 is iterative GRPO (DeepSeekMath, arXiv:2402.03300, algorithm 1)."""
        self.engine.blend(policy.engine, mix)


class UnadaptedReference(Reference):
    """The reference of a policy with adapters: its engine with the adapters off, which is never refreshed or saved."""

    def __init__(self, policy: Policy, adapters: Adapters) -> None:
        self._policy, self._adapters = policy.engine, adapters

    def logprobs(self, batches: list[MicroBatch], shape: tuple[int, int], temperature: float) -> Tensor:
        with self._adapters.off(), routed(None):
            return measured(self._policy, batches, shape, temperature)[0]
