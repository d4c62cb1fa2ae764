"""Objectives that are refused, and those that are not: the papers' own."""

from typing import Any

import pytest

from hybrid_grpo.config import TrainConfig, build
from hybrid_grpo.config.errors import UserError

TWO = ["exact_match", "format_regex"]

REFUSED = [
    ({"epsilon_low": 1.0}, "grpo.epsilon_low 1.0 must be in (0, 1)"),
    ({"dual_clip": 1.0}, "grpo.dual_clip 1.0 must be greater than 1"),
    ({"dual_clip": 3.0, "surrogate": "cispo"}, "grpo.dual_clip 3.0 has no effect with grpo.surrogate cispo"),
    ({"epsilon_low": 0.3, "surrogate": "cispo"}, "grpo.epsilon_low 0.3 has no effect with grpo.surrogate cispo"),
    ({"importance": "sequence", "surrogate": "cispo"}, "grpo.importance sequence is not defined for grpo.surrogate"),
    ({"baseline": "leave_one_out", "scale_rewards": "batch"}, "grpo.baseline leave_one_out multiplies all advantages"),
    ({"combine_rewards": "normalize"}, "grpo.combine_rewards normalize and grpo.scale_rewards group divide"),
    ({"kl_target": 0.0, "beta": 0.1}, "grpo.kl_target 0.0 must be greater than 0"),
    ({"kl_target": 0.1}, "grpo.kl_target 0.1 multiplies grpo.beta, and 0 stays 0: set grpo.beta"),
    ({"kl_in": "reward"}, "grpo.kl_in reward has no effect with grpo.beta 0, which loads no reference: set grpo.beta"),
    ({"kl_estimator": "k2"}, "grpo.kl_estimator k2 has no effect with grpo.beta 0"),
    ({"kl_unbiased": True}, "grpo.kl_unbiased true has no effect with grpo.beta 0"),
    ({"kl_unbiased": True, "kl_in": "reward", "beta": 0.1}, "grpo.kl_unbiased corrects a KL in the loss"),
    ({"kl_unbiased": True, "kl_estimator": "k2", "beta": 0.1}, "grpo.kl_unbiased cannot correct grpo.kl_estimator k2"),
    ({"kl_estimator": "k1", "beta": 0.1}, "grpo.kl_estimator k1 in the loss has a gradient of mean 0"),
    ({"old_logp": "sampler", "sampler_correction": "mask"}, "grpo.sampler_correction mask compares the sampler"),
    ({"sampler_correction": "truncate", "sampler_ratio_max": 0.9}, "grpo.sampler_ratio_max 0.9 must be 1 or greater"),
    ({"sampler_ratio_max": 3.0}, "grpo.sampler_ratio_max 3.0 has no effect with grpo.sampler_correction none"),
    ({"overlong_buffer": 512}, "grpo.overlong_buffer 512 punishes every completion: set it below rollout.max_comp"),
    ({"overlong_penalty": 2.0}, "grpo.overlong_penalty 2.0 has no effect with grpo.overlong_buffer 0"),
    ({"max_resamples": 3}, "grpo.max_resamples 3 has no effect with grpo.dynamic_sampling false"),
    ({"ref_every": 10}, "grpo.ref_every 10 has no effect with grpo.beta 0, which loads no reference"),
    ({"ref_mix": 0.5, "beta": 0.1}, "grpo.ref_mix 0.5 has no effect with grpo.ref_every 0"),
    ({"ref_mix": 0.0, "ref_every": 1, "beta": 0.1}, "grpo.ref_mix 0.0 must be in (0, 1]"),
    ({"ref_mix": 1.5, "ref_every": 1, "beta": 0.1}, "grpo.ref_mix 1.5 must be in (0, 1]"),
]


def refusal(**settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        build(TrainConfig, settings)
    message = str(caught.value)
    assert "\n" not in message and "{" not in message
    return message


@pytest.mark.parametrize("settings, says", REFUSED, ids=[", ".join(settings) for settings, _ in REFUSED])
def test_what_means_nothing_is_refused(settings, says):
    message = refusal(grpo=settings, rewards=TWO)
    assert message.startswith(says)
    assert any(way in message for way in ("set ", "take ", "must be ")), "there is a way out"


CRITIC = {"enabled": True}
REFUSED_CRITICS = [
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
        "engine.deepspeed.zero_optimization.offload_param is for sharded weights, which the critic has not",
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
    ({"critic": CRITIC, "grpo": {"baseline": "leave_one_out"}}, "grpo.baseline leave_one_out has no effect with crit"),
    ({"rollout": {"num_generations": 1}}, "rollout.num_generations 1 makes no group: advantages need 2 or more, or"),
]


@pytest.mark.parametrize("settings, says", REFUSED_CRITICS, ids=[says[:40] for _, says in REFUSED_CRITICS])
def test_critics_that_mean_nothing_are_refused(settings, says):
    assert refusal(rewards=TWO, **settings).startswith(says)


ALONE = {"rollout": {"num_generations": 1}, "teacher": {"model": "m"}}
REFUSED_TEACHERS = [
    ({"teacher": {"coef": 0.5}}, "teacher.coef 0.5 has no effect without a teacher: set teacher.model or teacher.prom"),
    ({"teacher": {"into": "loss"}}, "teacher.into loss has no effect without a teacher: set teacher.model or"),
    ({"teacher": {"model": "m", "coef": 0.0}}, "teacher.coef 0.0 must be greater than 0"),
    (
        {"teacher": {"model": "m", "top_k": 8}},
        "teacher.top_k 8 has no effect with teacher.into advantage: set teacher.",
    ),
    (
        {"teacher": {"prompt_column": "solved", "offload": False}},
        "teacher.offload false has no effect where the policy itself is the teacher: set teacher.model",
    ),
    ({"teacher": {"prompt_column": "prompt"}}, "teacher.prompt_column prompt is data.prompt_column, which the policy"),
    (
        {"teacher": {"prompt_column": "solved"}, "data": {"path": "x.jsonl", "streaming": True}},
        "teacher is checked with all prompts before the run, which data.streaming does not know",
    ),
    ({**ALONE, "grpo": {"scale_rewards": "none"}}, "grpo.scale_rewards none is about rewards in a group, and rollout."),
    ({**ALONE, "grpo": {"dynamic_sampling": True}}, "grpo.dynamic_sampling true is about rewards in a group"),
    (
        {**ALONE, "grpo": {"beta": 0.1, "kl_in": "reward"}},
        "grpo.kl_in reward is about rewards in a group, and rollout.num_generations 1 makes none",
    ),
]


@pytest.mark.parametrize("settings, says", REFUSED_TEACHERS, ids=[says[:40] for _, says in REFUSED_TEACHERS])
def test_teachers_that_mean_nothing_are_refused(settings, says):
    assert refusal(rewards=TWO, **settings).startswith(says)


@pytest.mark.parametrize("settings", [
    ALONE,
    {"teacher": {"prompt_column": "solved", "into": "loss", "top_k": 64}},
    {**ALONE, "critic": CRITIC, "grpo": {"beta": 0.1, "kl_in": "reward"}},
])  # fmt: skip
def test_teachers_that_mean_something_are_not(settings):
    assert build(TrainConfig, {**settings, "rewards": TWO}).teacher.is_on


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


def test_one_reward_needs_no_weighing():
    grpo = {"combine_rewards": "normalize", "scale_rewards": "batch"}
    message = refusal(grpo=grpo, rewards=TWO[:1])
    assert message.startswith("grpo.combine_rewards normalize weighs rewards against each other")


def test_masking_what_is_cut_leaves_nothing_where_all_is_cut():
    message = refusal(grpo={"mask_truncated": True}, rollout={"ignore_eos": True})
    assert message.startswith("grpo.mask_truncated leaves nothing to learn from where rollout.ignore_eos")


@pytest.mark.parametrize("settings", [
    {},
    {"dual_clip": 3.0, "epsilon_high": 0.28},
    {"surrogate": "cispo", "epsilon_high": 4.0},
    {"importance": "sequence", "loss_type": "grpo", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    {"baseline": "leave_one_out", "scale_rewards": "none", "beta": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    {"combine_rewards": "normalize", "scale_rewards": "batch"},
    {"beta": 0.1, "kl_estimator": "k1", "kl_unbiased": True, "kl_target": 0.01},
    {"dynamic_sampling": True, "max_resamples": 1, "overlong_buffer": 100, "overlong_penalty": 0.5},
    {"sampler_correction": "mask", "sampler_ratio_max": 1.0, "old_logp": "policy"},
    {"beta": 0.1, "ref_every": 1, "ref_mix": 0.01},
])  # fmt: skip
def test_what_means_something_is_not(settings):
    build(TrainConfig, {"grpo": settings, "rewards": TWO})
