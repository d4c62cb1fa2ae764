"""The reward functions of a run: those for training, and those of held-out sets that have functions of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid_grpo.config import environment_rewards
from hybrid_grpo.config.composition import EvaluationConfig
from hybrid_grpo.config.held_out import HeldOut
from hybrid_grpo.rewards.loader import Reward, load_entries
from hybrid_grpo.rewards.scorer import Rewards
from hybrid_grpo.turns.rewards import rewards_of


class RewardSets:
    """All reward functions, in one pool of processes. The constructor imports them, and raises UserError on failure."""

    def __init__(self, config: EvaluationConfig, sets: Sequence[HeldOut]) -> None:
        settings = {"rewards": config.rewards, **{held.setting: held.rewards for held in sets if held.rewards}}
        entries = {
            (setting, f"{setting if setting == 'rewards' else f'{setting}.rewards'}[{index}]"): reward
            for setting, rewards in settings.items()
            for index, reward in enumerate(rewards)
        }
        loaded = load_entries({entry: reward for (_, entry), reward in entries.items()}, config.scoring)
        self._config = config
        self._functions: dict[str, list[Reward]] = {setting: [] for setting in settings}
        for (setting, _), reward in zip(entries, loaded, strict=True):
            self._functions[setting].append(reward)

    def ready(self, tokenizer: Any, *, by_turn: bool = True) -> dict[str, Rewards]:
        """Give the functions the tokenizer, and return them by the setting that names them (`rewards`: the run's)."""
        config = self._config
        of_environments = rewards_of(list(environment_rewards(config.rollout).values()), by_turn=by_turn)
        return {
            setting: Rewards(functions, config.scoring, tokenizer, of_environments)
            for setting, functions in self._functions.items()
        }
