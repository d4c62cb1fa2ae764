"""Programs that test_reward_model_ranks.py starts under the launcher; see rank_programs.py.

FOLDER holds the letters, and a reward model in `rm`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rank_programs import build, main
from seeing import pictures

from hybrid_grpo import engine as engines
from hybrid_grpo.config import RewardConfig, ScoringConfig
from hybrid_grpo.data.batch import Completion, Prompt
from hybrid_grpo.data.picture import read_picture
from hybrid_grpo.distributed.ranks import rank, world_size
from hybrid_grpo.records.metrics.meter import Meter
from hybrid_grpo.rewards.loader import load_rewards
from hybrid_grpo.rewards.models.reward_model import reward_model
from hybrid_grpo.rewards.scorer import Rewards
from hybrid_grpo.trainer import Trainer

PROMPTS = [f"{'abcdefgh' * (k % 5)}{k}? " for k in range(40)]


def rewards(folder: Path, zero_stage: int, **kwargs: Any) -> Rewards:
    """`exact_match`, which tells right from wrong, and the reward model."""
    kwargs = {"model": str(folder / "rm"), "zero_stage": zero_stage, **kwargs}
    model = RewardConfig("reward_model", weight=0.5, kwargs=kwargs)
    made = Rewards(load_rewards([RewardConfig("exact_match"), model], ScoringConfig()))
    made.load_models(engines.OffloadedModel)
    return made


def unequal(folder: Path) -> dict[str, Any]:
    """Sharded scores, and those of the same model alone; ranks have unequal rows, now and then none."""
    engines.start()
    sharded = rewards(folder, 3, batch_tokens=64)
    rows = [Prompt(k, text, [1], {"answer": "b"}) for k, text in enumerate(PROMPTS)]
    completions = [Completion([1], [0.0], "stop", "xyz"[: k % 4]) for k in range(40)]
    shares = [range(0, 37), range(37, 40)]
    seen: dict[str, Any] = {"sharded": [], "alone": [], "failed": []}
    for first, last in (shares, shares[::-1], (range(0, 20), range(0)), (range(0), range(0))):
        mine = list((first, last)[rank()] if world_size() > 1 else [*first, *last])
        scores = sharded.score([rows[k] for k in mine], [completions[k] for k in mine])
        seen["sharded"].append(scores.by_function["reward_model"].tolist())
        texts = [completions[k].text for k in mine]
        seen["alone"].append(reward_model([PROMPTS[k] for k in mine], texts, model=str(folder / "rm")))
    # A row that fails on one rank leaves the others in step.
    chat = replace(rows[0], text=[{"role": "user", "content": "a"}])
    scores = sharded.score([chat if rank() else rows[0], rows[1]], completions[:2])
    seen["failed"] = scores.reward_B.isnan().tolist()
    seen["sights"] = _sights(folder)
    return seen


def _sights(folder: Path) -> list[list[float]]:
    """Scores of a sharded model that sees, and of the same alone. Of two ranks the second has no pictures."""
    shown = [(read_picture(picture, None, "a row"),) for picture in pictures()] * 2
    rows = [Prompt(k, PROMPTS[k], [1], {}, pictures=() if rank() else shown[k]) for k in range(8 - 5 * rank())]
    ended = [Completion([1], [0.0], "stop", "xyz"[: k % 4]) for k in range(len(rows))]
    found = []
    for zero_stage in (3, 0):
        kwargs = {"model": str(folder / "sees"), "batch_tokens": 64, "template": "chat", "zero_stage": zero_stage}
        made = Rewards(load_rewards([RewardConfig("reward_model", kwargs=kwargs)]))
        made.load_models(engines.OffloadedModel)
        found.append(made.score(rows, ended).reward_B.tolist())
    return found


def steps(folder: Path, zero_stage: int) -> dict[str, Any]:
    """Two steps and an evaluation."""
    trainer: Trainer = build(folder)
    made = rewards(folder, zero_stage)
    trainer.eval_sets = [replace(held_out, rewards=made) for held_out in trainer.eval_sets[:1]]
    trainer.inputs = replace(trainer.inputs, rewards=made, eval_sets=trainer.eval_sets)
    trainer.meter = Meter(trainer.device)
    seen: dict[str, Any] = {"scores": [], "rewards": [], "metrics": []}
    for step in (1, 2):
        trainer.step(step)
        assert trainer.last_rollout is not None
        _, scores, _ = trainer.last_rollout
        seen["scores"].append(scores.by_function["reward_model"].tolist())
        seen["rewards"].append(scores.reward_B.tolist())
        seen["metrics"].append(trainer.meter.reduce())
    trainer.evaluate(0, trainer.eval_sets)
    seen["eval"] = trainer.meter.reduce()
    return seen


def sharded(folder: Path) -> dict[str, Any]:
    return steps(folder, 3)


def alone(folder: Path) -> dict[str, Any]:
    return steps(folder, 0)


if __name__ == "__main__":
    main(globals())
