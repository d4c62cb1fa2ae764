"""Programs for several ranks about objectives; see rank_programs.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from paths import ROOT, SUPPORT
from rank_programs import build, main

from hybrid_grpo.config import GrpoConfig, RewardConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.distributed.ranks import rank, world_size
from hybrid_grpo.grpo.objective import load_objective
from hybrid_grpo.rewards.loader import load_rewards
from hybrid_grpo.rewards.scorer import Rewards
from hybrid_grpo.run.reference import Reference
from hybrid_grpo.trainer import Trainer

OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.1}, "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {
        **{"epsilon_high": 0.28, "mask_truncated": True, "overlong_buffer": 6, "dynamic_sampling": True},
        **{"max_resamples": 2, "num_minibatches": 2},
    },
    "gspo": {"loss_type": "grpo", "importance": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"surrogate": "cispo", "epsilon_high": 4.0, "entropy_coef": 0.01},
    "rloo": {
        **{"baseline": "leave_one_out", "scale_rewards": "none", "beta": 0.05, "kl_in": "reward"},
        **{"kl_estimator": "k1", "loss_type": "dr_grpo", "old_logp": "policy"},
    },
    "reinforce++ baseline": {"scale_rewards": "batch", "beta": 0.1, "kl_estimator": "k2"},
    "gdpo": {"combine_rewards": "normalize", "scale_rewards": "batch"},
    "deepseek v3.2": {"beta": 0.1, "kl_unbiased": True, "kl_target": 0.5, "sampler_correction": "mask"},
    "truncated sampling": {"sampler_correction": "truncate", "sampler_ratio_max": 1.0, "dual_clip": 3.0},
    "maxrl": {"preset": "maxrl"}, "opo": {"preset": "opo"}, "otb": {"preset": "otb"},
    "pass_at_k": {"preset": "pass_at_k"}, "top_entropy": {"preset": "top_entropy"},
    "clip_cov": {"preset": "clip_cov", "tokens_share": 0.2, "cov_low": -3.0},
    "kl_cov": {"preset": "kl_cov", "entropy_coef": 0.02, "entropy_target": 2.0},
    "icepop": {"preset": "icepop", "sampler_normalize": True, "beta": 0.2},
    "tpo": {"objective": f"{ROOT}/training_scripts/objectives/tpo.py:tpo", "whole_groups": True, "loss_type": "grpo"},
    "process": {"scale_rewards": "batch"}, "process, in pieces": {"scale_rewards": "batch"},
    "process, normalized": {"scale_rewards": "batch", "step_credit": "normalized"},
    "process, each step alone": {"step_discount": 0.0},
}  # fmt: skip


def with_objective(trainer: Trainer, grpo: GrpoConfig, reference: Reference | None) -> Trainer:
    """A trainer of the same policy and task, at the first prompt again."""
    config = replace(trainer.config, grpo=grpo)
    held = reference if grpo.beta else None
    return Trainer(config, batch_plan(config, world_size()), trainer.policy, held, trainer.inputs, trainer.device)


def frozen(trainer: Trainer) -> Reference:
    """Optimizer steps too small to change a weight, and a reference that is not the policy: every KL is above 0."""
    trainer.policy.config = replace(trainer.policy.config, lr=1e-30)
    reference = Reference(trainer.policy.config, trainer.config.engine)
    for parameter in reference.engine.engine.module.parameters():
        parameter.ds_tensor.mul_(1.1)
    return reference


def objectives(folder: Path) -> dict[str, Any]:
    """One step of every objective from the same weights; and what a reference is after a refresh."""
    trainer = build(folder, prompts_per_step=12)
    reference = frozen(trainer)
    task, seen = trainer.inputs, {}
    of_wholes, file = trainer.config.rewards, SUPPORT.joinpath("acting_rewards.py")
    for name, settings in OBJECTIVES.items():
        rewards = list(of_wholes)
        if name.startswith("process"):
            function = "letter_pieces" if name == "process, in pieces" else "letters"
            rewards.append(RewardConfig(f"{file}:{function}", weight=0.5))
        trainer.config = replace(trainer.config, rewards=rewards)
        scorer = Rewards(load_rewards(rewards), tokenizer=task.tokenizer)
        objective = load_objective(GrpoConfig(**settings))
        trainer.inputs = replace(task, rewards=scorer, objective=objective)
        one = with_objective(trainer, GrpoConfig(**settings), reference)
        one.step(1)
        assert one.last_rollout is not None
        rollout, scores, advantages_B = one.last_rollout
        seen[name] = {
            "metrics": one.meter.reduce(),
            "rows": [
                (p.id, c.token_ids, reward, advantage)
                for p, c, reward, advantage in zip(
                    rollout.row_prompts,
                    rollout.completions,
                    scores.reward_B.tolist(),
                    advantages_B.tolist(),
                    strict=True,
                )
            ],
            "beta": one.kl.beta, "drawn": one.loader.state_dict()["offset"],
        }  # fmt: skip
    return {
        "objectives": seen,
        "refresh": {str(stage): refreshed(folder, stage) for stage in (3, 0)},
        "zeros": zeros(folder),
    }


def refreshed(folder: Path, stage: int) -> dict[str, Any]:
    """How far a reference is from the policy it is refreshed from."""
    trainer = build(folder, stage=stage)
    policy = trainer.policy
    reference = Reference(policy.config, trainer.config.engine)
    rollout = trainer.sample(trainer.draw_prompts(), 1)
    batches = trainer.micro_batches(rollout, range(len(rollout.completions)))
    shape = (len(rollout.completions), max(rollout.lengths))
    before = weights(reference)
    reference.logprobs(batches, shape, 1.0)
    for _ in range(2):
        trainer.step(1)
    reference.refresh(policy, 0.5)
    half = weights(reference)
    reference.refresh(policy, 1.0)
    full = weights(reference)
    seen = {
        "moved": max(float((a - b).abs().max()) for a, b in zip(full, before, strict=True)),
        "average": max(float((h - (a + b) / 2).abs().max()) for h, a, b in zip(half, before, full, strict=True)),
        "apart": 0.0,
    }
    ref_logp_BT = reference.logprobs(batches, shape, 1.0)
    for micro in batches:
        with torch.no_grad():
            logp_bT, _ = policy.forward(micro, 1.0)
        if micro.rows:
            apart = (logp_bT - ref_logp_BT[micro.rows, : logp_bT.shape[1]]).abs().max()
            seen["apart"] = max(seen["apart"], float(apart))
    return seen


def zeros(folder: Path) -> dict[str, Any]:
    """Steps in which groups have advantages of 0, with and without a backward pass of them: on the first rank half of
    the groups, on the second all; and on both ranks all."""
    trainer, seen = build(folder, num_minibatches=2), {}
    trainer.config = replace(trainer.config, grpo=replace(trainer.config.grpo, balance="off"))
    trainer.policy.lr_scale = 0.0
    rollout, scores = trainer.collect(1)
    trainer.meter.reduce()
    highest = trainer.max_over_ranks
    for name, kept in {"uneven": [] if rank() else [0, 2], "all": []}.items():
        advantages_PT = torch.zeros(len(rollout.prompts), 12)
        advantages_PT[kept] = 0.5
        trainer.advantages = lambda *_, of=advantages_PT: of.repeat_interleave(4, 0)  # type: ignore[method-assign]
        for way in (highest, None):
            trainer.max_over_ranks = way
            trainer.learn(rollout, scores)
            seen[f"{name}, {'left out' if way else 'trained on'}"] = trainer.meter.reduce()
    return seen


def weights(reference: Reference) -> list[torch.Tensor]:
    """This rank's shards."""
    return [p.ds_tensor.float().clone() for p in reference.engine.engine.module.parameters()]


if __name__ == "__main__":
    main(globals())
