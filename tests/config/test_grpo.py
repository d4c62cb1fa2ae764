"""Objectives that are refused, and those that are not: the papers' own."""

import pytest
from refusals import TWO, refusal

from hybrid_grpo.config import TrainConfig, build

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


@pytest.mark.parametrize("settings, says", REFUSED, ids=[", ".join(settings) for settings, _ in REFUSED])
def test_what_means_nothing_is_refused(settings, says):
    message = refusal(grpo=settings, rewards=TWO)
    assert message.startswith(says)
    assert any(way in message for way in ("set ", "take ", "must be ")), "there is a way out"


def test_one_reward_needs_no_weighing():
    grpo = {"combine_rewards": "normalize", "scale_rewards": "batch"}
    message = refusal(grpo=grpo, rewards=TWO[:1])
    assert message.startswith("grpo.combine_rewards normalize weighs rewards against each other")


def test_masking_what_is_cut_leaves_nothing_where_all_is_cut():
    message = refusal(grpo={"mask_truncated": True}, rollout={"ignore_eos": True})
    assert message.startswith("grpo.mask_truncated leaves nothing to learn from if rollout.ignore_eos")


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
