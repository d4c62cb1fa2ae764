"""The critic of a run: a value model next to the policy, in its own DeepSpeed engine. gae.py has the advantages."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo import engine as engines
from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.data.batch import MicroBatch, Numbers, TrainBatch
from hybrid_grpo.features.critic.gae import ValueTargets, critic_advantages
from hybrid_grpo.features.critic.memory import CriticMemory
from hybrid_grpo.features.critic.settings import CriticConfig
from hybrid_grpo.model.compatibility import check_compatible
from hybrid_grpo.model.limits import check_lengths
from hybrid_grpo.model.scalar_model import check_scalar
from hybrid_grpo.policy import Policy, ScalarModelTrainer
from hybrid_grpo.run.feature import Advantages, Feature, Log, Scored
from hybrid_grpo.run.inputs import RunInputs
from hybrid_grpo.run.parts import SideModel
from hybrid_grpo.run.saving.space import states_bytes

_FOLDER = "critic"
"""Name of the critic's folder in a checkpoint."""


class Critic(ScalarModelTrainer, SideModel):
    """Predicts, before each token of a completion, the reward that the completion will still earn.

    It reads the same tokens as the policy. The value of a token is computed from the hidden state at the token before
    it. A new value head is initialized to 0, since random values would be noise in the first advantages.

    Args:
        config, plan: the run's settings and batch equation.
        tokenizer: the policy's.
    """

    def __init__(self, config: TrainConfig, plan: BatchPlan, tokenizer: Any) -> None:
        self._run, self._plan, self._settings = config, plan, config.of(CriticConfig)
        super().__init__(
            self._settings.as_policy(config.policy),
            self._settings.as_engine(config.engine),
            tokenizer,
            total_steps=config.run.steps * plan.optimizer_steps,
            padding=None,
            head_std=0.0,
            setting=_setting(config),
        )
        self._targets: ValueTargets | None = None

    @property
    def learns_alone(self) -> bool:
        """Whether only the critic learns, and the policy does not learn yet."""
        return self.optimizer_steps < self._settings.warmup_steps * self._plan.optimizer_steps

    def advantages(self, scored: Scored) -> tuple[Tensor, Numbers]:
        """Return the advantages of all tokens and the critic's metrics; see `critic_advantages`. The targets are kept
        for `learn`. Collective."""
        rollout = scored.rollout
        value_BT = self.values(scored.micro_batches(), (len(rollout.completions), max(rollout.lengths)))
        advantages_BT, self._targets, numbers = critic_advantages(
            rollout, scored.scores, self._run, value_BT, scored.kl_BT, scored.beta, self.engine.device
        )
        return advantages_BT, numbers

    @torch.no_grad()
    def values(self, batches: list[MicroBatch], shape: tuple[int, int]) -> Tensor:
        """Return the values of all completion tokens, float32 [B, T], 0 on padding; `shape` is (B, T). Collective."""
        value_BT = torch.zeros(shape, device=self.engine.device)
        for micro in batches:
            value_N = self.forward(micro)
            if micro.rows:
                value_BT[micro.row_b, : micro.mask_bT.shape[1]] = micro.unflatten(value_N)
        return value_BT

    def learn(self, batches: Sequence[TrainBatch], beat: Callable[[], None]) -> Iterator[Numbers]:
        """Take one optimizer step on rows of the rollout that was last passed to `advantages`; yields the metrics of
        each micro-batch and of the step. `beat` is called before each micro-batch. Collective."""
        assert self._targets is not None
        for batch in batches:
            beat()
            micro = batch.micro
            value_bT = micro.unflatten(self.forward(micro))
            old_value_bT, return_bT = map(micro.of_rows, (self._targets.old_value_BT, self._targets.return_BT))
            loss, numbers = value_loss(value_bT, old_value_bT, return_bT, batch.weight_bT, self._settings)
            self.engine.backward(loss)
            yield {**numbers, "critic/loss": (loss / self._plan.optimizer_steps, 1)}
        yield {"critic/lr": (self.lr, 1), "critic/grad_norm": (self.step().grad_norm, 1)}

    def save(self, folder: Path) -> None:
        self.engine.save(folder, _FOLDER, self.state_dict())

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on any number of ranks; raises UserError if nothing was saved."""
        self.load_state_dict(self.engine.load(folder, _FOLDER))

    def checkpoint_bytes(self, weights: int) -> int:
        return states_bytes(self)


def value_loss(
    value_bT: Tensor, old_value_bT: Tensor, return_bT: Tensor, weight_bT: Tensor, critic: CriticConfig
) -> tuple[Tensor, Numbers]:
    """Return the clipped value loss, weighted and summed, and its metrics.

    The loss of a token is 0.5 max((V - R)^2, (V' - R)^2), where V' is V clipped to within `critic.clip` of the value
    before the step (OpenAI's code for PPO, arXiv:1707.06347; see arXiv:2005.12729, section 3).

    Args:
        value_bT: float, the critic's current values, with gradient.
        old_value_bT, return_bT: see `ValueTargets`; tokens whose return is NaN are left out.
        weight_bT: float, 0 on padding; as in the policy's loss, see `token_weights`.
    """
    real_bT = (weight_bT > 0) & ~return_bT.isnan()
    value_bT, old_bT, return_bT = (torch.where(real_bT, x, 0.0) for x in (value_bT, old_value_bT, return_bT))
    error_bT, clipped_bT = (value_bT - return_bT).square(), torch.zeros_like(real_bT)
    if critic.clip:
        moved_bT = value_bT - old_bT
        bound_bT = (old_bT + moved_bT.clamp(-critic.clip, critic.clip) - return_bT).square()
        # If a value has not moved this far, both errors are equal up to rounding.
        clipped_bT = (moved_bT.abs() > critic.clip) & (bound_bT > error_bT)
        error_bT = torch.where(clipped_bT, bound_bT, error_bT)
    tokens = real_bT.sum()
    loss = 0.5 * (error_bT * torch.where(real_bT, weight_bT, 0.0)).sum()
    return loss, {"critic/clip_frac": (clipped_bT.sum() / tokens.clamp(min=1), tokens)}


class CriticFeature(Feature):
    """Computes advantages relative to a critic's values, and trains the critic."""

    name, memory = "critic", CriticMemory
    is_timed = True
    model: Critic
    _learns_alone = False
    """Whether the policy does not learn from this rollout yet."""

    def __init__(self, config: TrainConfig, plan: BatchPlan, inputs: RunInputs) -> None:
        super().__init__(config, plan, inputs)
        check_critic(config, inputs)

    def load(self, policy: Policy) -> None:
        self.model = Critic(self.config, self.plan, self.inputs.tokenizer)

    def advantages(self, scored: Scored) -> Advantages:
        self._learns_alone = self.model.learns_alone
        return Advantages(*self.model.advantages(scored), replaces=True)

    def update(self, batches: Sequence[TrainBatch], beat: Callable[[], None], log: Log) -> bool:
        for numbers in self.model.learn(batches, beat):
            log(numbers)
        return self._learns_alone


def check_critic(config: TrainConfig, inputs: RunInputs) -> None:
    """Raise UserError, before weights load, if the model cannot be a critic or cannot read what the policy reads."""
    settings = config.of(CriticConfig)
    policy, setting = settings.as_policy(config.policy), _setting(config)
    engines.check_config(policy, settings.as_engine(config.engine))
    model_config = check_scalar(policy.model, setting)
    if settings.model is None:
        return
    check_compatible(policy, model_config, config.policy, inputs.tokenizer, "critic.model")
    longest = config.rollout.longest(inputs.longest_prompt)
    check_lengths(model_config, longest, config.rollout.lengths, f"{setting} {policy.model}")


def _setting(config: TrainConfig) -> str:
    return "policy.model" if config.of(CriticConfig).model is None else "critic.model"
