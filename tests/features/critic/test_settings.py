"""Settings of a critic that are refused, and those that are not."""

from pathlib import Path

import pytest
from refusals import TWO, refusal

from hybrid_grpo.config import TrainConfig, build
from hybrid_grpo.records.publishing.card import TrainedRun

CRITIC = {"enabled": True}
REFUSED = [
    ({"critic": {"lr": 1e-3}}, "critic.lr 0.001 has no effect without critic.enabled: set critic.enabled to true"),
    ({"critic": {"whiten": False}}, "critic.whiten false has no effect without critic.enabled"),
    ({"critic": {**CRITIC, "lam": 1.5}}, "critic.lam 1.5 must be in [0, 1]"),
    ({"critic": {**CRITIC, "gamma": 0.0}}, "critic.gamma 0.0 must be in (0, 1]"),
    ({"critic": {**CRITIC, "zero_stage": 0}}, "policy.dtype bfloat16 needs critic.zero_stage 1 or higher"),
    ({"critic": {**CRITIC, "warmup_steps": 100}}, "critic.warmup_steps 100 leaves the policy none of run.steps"),
    (
        {"critic": {**CRITIC, "zero_stage": 0, "offload_optimizer": True}, "policy": {"dtype": "float32"}},
        "critic.offload_optimizer needs critic.zero_stage 1 or higher: set critic.zero_stage to 1",
    ),
    (
        {
            **{"critic": {**CRITIC, "zero_stage": 2}},
            "engine": {"deepspeed": {"zero_optimization": {"offload_param": {"device": "cpu"}}}},
        },
        "engine.deepspeed.zero_optimization.offload_param is for sharded weights, which the critic does not have",
    ),
    (
        {"critic": CRITIC, "grpo": {"dynamic_sampling": True}, "rollout": {"num_generations": 1}},
        "grpo.dynamic_sampling replaces groups of equal rewards, which all groups of rollout.num_generations 1 are",
    ),
    (
        {"critic": CRITIC, "grpo": {"scale_rewards": "none"}},
        "grpo.scale_rewards none has no effect with critic.enabled",
    ),
    (
        {"critic": CRITIC, "grpo": {"combine_rewards": "normalize", "scale_rewards": "batch"}},
        "grpo.scale_rewards batch has no effect with critic.enabled",
    ),
    ({"critic": CRITIC, "grpo": {"step_credit": "normalized"}}, "grpo.step_credit normalized has no effect with crit"),
    ({"critic": CRITIC, "grpo": {"step_discount": 0.0}}, "grpo.step_discount 0.0 has no effect with critic.enabled"),
    ({"critic": CRITIC, "grpo": {"baseline": "leave_one_out"}}, "grpo.baseline leave_one_out has no effect with crit"),
    ({"rollout": {"num_generations": 1}}, "rollout.num_generations 1 makes no group: advantages need 2 or more, or"),
]


@pytest.mark.parametrize("settings, says", REFUSED, ids=[says[:40] for _, says in REFUSED])
def test_critics_that_mean_nothing_are_refused(settings, says):
    assert refusal(rewards=TWO, **settings).startswith(says)


def test_a_critic_is_made_like_the_policy_but_for_its_own_settings():
    settings = {
        "policy": {"model": "m", "lr": 1e-6, "warmup_steps": 5, "betas": [0.5, 0.6], "dtype": "float32"},
        "engine": {"zero_stage": 2, "deepspeed": {"comms_logger": {"enabled": True}}},
        "rollout": {"num_generations": 1},
        "critic": {**CRITIC, "lr": 1e-4, "offload_optimizer": True},
    }
    config = build(TrainConfig, settings)
    policy, engine = config.critic.as_policy(config.policy), config.critic.as_engine(config.engine)
    assert (policy.model, policy.lr, policy.warmup_steps, policy.betas) == ("m", 1e-4, 0, (0.5, 0.6))
    assert (engine.zero_stage, engine.offload_optimizer) == (2, True) and engine.deepspeed == config.engine.deepspeed


def test_a_kl_in_the_reward_needs_no_group_beside_a_critic():
    alone, grpo = {"num_generations": 1}, {"beta": 0.1, "kl_in": "reward"}
    assert build(TrainConfig, {"critic": CRITIC, "rollout": alone, "grpo": grpo, "rewards": TWO}).critic.is_on


def test_a_model_that_learned_with_a_critic_is_published_as_one_of_ppo(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("critic: {enabled: true}\n")
    assert TrainedRun(tmp_path, tmp_path).stage == ("train", "PPO", TrainConfig)
