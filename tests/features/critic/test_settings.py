"""Settings of a critic that are refused, and those that are not."""

from pathlib import Path

from refusals import TWO

from hybrid_grpo.config import TrainConfig, build
from hybrid_grpo.records.publishing.card import TrainedRun

CRITIC = {"enabled": True}


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
