"""Programs that test_reward_model_ranks.py starts under the launcher; see rank_programs.py.

FOLDER holds the quickstart's task, and a reward model in `rm`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rank_programs import build, main

from hybrid_grpo.config import RewardConfig, ScoringConfig
from hybrid_grpo.rewards.loading import load_rewards
from hybrid_grpo.rewards.scoring import Rewards
from hybrid_grpo.trainer import Trainer


def rewards(folder: Path) -> Rewards:
    """`exact_match`, which tells right from wrong, and the reward model."""
    model = RewardConfig("reward_model", weight=0.5, kwargs={"model": str(folder / "rm")})
    made = Rewards(load_rewards([RewardConfig("exact_match"), model], ScoringConfig()))
    made.load_models()
    return made


def steps(folder: Path) -> dict[str, Any]:
    """Two steps and an evaluation."""
    trainer: Trainer = build(folder)
    trainer.inputs = replace(trainer.inputs, rewards=rewards(folder))
    trainer.meter.__init__(trainer.inputs.rewards.names, [trainer.config.eval.name], trainer.device)  # type: ignore[misc]
    seen: dict[str, Any] = {"scores": [], "rewards": [], "metrics": []}
    for step in (1, 2):
        trainer.step(step)
        assert trainer.last_rollout is not None
        _, scores, _ = trainer.last_rollout
        seen["scores"].append(scores.by_function["reward_model"].tolist())
        seen["rewards"].append(scores.reward_B.tolist())
        seen["metrics"].append(trainer.meter.reduce())
    trainer.evaluate(0)
    seen["eval"] = trainer.meter.reduce()
    return seen


if __name__ == "__main__":
    main(globals())
