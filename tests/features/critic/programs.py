"""Programs of test_critic.py: steps with a critic, on one rank and on two; see rank_programs.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rank_programs import made, main, restore, save

from hybrid_grpo.trainer import Trainer

METRICS = (
    *("policy/loss", "policy/grad_norm", "policy/kl", "reward/mean", "critic/loss", "critic/grad_norm", "critic/lr"),
    *("critic/value", "critic/return", "critic/explained_variance", "critic/clip_frac"),
)


def build(folder: Path, *, critic_stage: int) -> Trainer:
    """A run on the quickstart's tiny model and task, of one completion a prompt, with a KL in the reward and four
    optimizer steps a rollout. In the first step only the critic learns."""
    return made(
        folder,
        run={"steps": 10},
        policy={"micro_batch_tokens": 160},
        engine={"zero_stage": 3, "adam": "torch"},
        data={"limit": 100},
        rollout={"prompts_per_step": 24, "num_generations": 1, "max_completion_tokens": 8},
        grpo={"beta": 0.1, "kl_in": "reward", "kl_estimator": "k1", "num_minibatches": 2, "num_iterations": 2},
        critic={
            **{"enabled": True, "zero_stage": critic_stage, "lr": 1e-3, "warmup_steps": 1},
            **{"lam": 0.9, "gamma": 0.99, "clip": 0.01},
        },
    )


def steps(trainer: Trainer, numbers: range) -> list[dict[str, Any]]:
    """Metrics of steps, with some of the weights of the policy and of the critic after them."""
    seen = []
    for step in numbers:
        trainer.step(step)
        metrics = trainer.meter.reduce()
        seen.append({name: metrics[name] for name in METRICS if name in metrics})
        for model in (trainer.policy, *trainer.features.models):
            named = {p: name for name, p in model.engine.engine.module.named_parameters() if p.requires_grad}
            whole = model.engine.whole(list(named))
            seen[-1][type(model).__name__] = {named[p]: weight.flatten()[::50].tolist() for p, weight in whole.items()}
    return seen


def two(folder: Path) -> dict[str, Any]:
    """Three steps, saved after the second; and the third again, by the same engines and by new ones."""
    trainer = build(folder, critic_stage=3)
    seen = {"steps": steps(trainer, range(1, 3))}
    save(trainer, folder, "two")
    seen["steps"] += steps(trainer, range(3, 4))
    restore(trainer, folder, "two")
    seen["again"] = steps(trainer, range(3, 4))
    resumed = build(folder, critic_stage=3)
    restore(resumed, folder, "two")
    seen["resumed"] = steps(resumed, range(3, 4))
    return seen


def one(folder: Path) -> dict[str, Any]:
    """The same three steps at another stage; the third after the checkpoint of two ranks."""
    trainer = build(folder, critic_stage=0)
    seen = {"steps": steps(trainer, range(1, 4))}
    restore(trainer, folder, "two")
    seen["resumed"] = steps(trainer, range(3, 4))
    return seen


if __name__ == "__main__":
    main(globals())
