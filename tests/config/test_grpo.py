"""Objectives that are refused, and those that are not: the papers' own."""

import pytest
import yaml
from refusals import TWO, refusal, refused

from hybrid_grpo.config import GrpoConfig, TrainConfig, build
from hybrid_grpo.config.building import to_dict
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.config.presets import preset_fact

REFUSED = refused("objectives")


@pytest.mark.parametrize("settings, says", REFUSED, ids=[", ".join(settings) for settings, _ in REFUSED])
def test_what_means_nothing_is_refused(settings, says):
    message = refusal(grpo=settings, rewards=TWO)
    assert message.startswith(says)
    assert any(way in message for way in ("set ", "take ", "must be ", "did you mean")), "there is a way out"


@pytest.mark.parametrize("settings", [
    {}, {"dual_clip": 3.0, "epsilon_high": 0.28}, {"surrogate": "cispo", "epsilon_high": 4.0},
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


def parsed(tmp_path, *arguments, **files):
    for name, grpo in files.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"grpo": grpo}))
    given = [str(tmp_path / f"{a}.yaml") if a in files else a for a in arguments]
    return parse(TrainConfig, ["--rewards", "exact_match", "--data.task", "gsm8k", *given], "train").config.grpo


def test_a_preset_wins_over_recipes_before_it_and_loses_to_what_is_given_beside_it(tmp_path):
    recipe = {"loss_type": "dr_grpo", "epsilon_high": 0.3, "num_iterations": 2}
    after = parsed(tmp_path, "--config", "recipe", "--grpo.preset", "gspo", recipe=recipe)
    assert (after.loss_type, after.epsilon_high, after.num_iterations) == ("grpo", 4e-4, 2)
    for order in (["--grpo.epsilon_high=0.5", "--grpo.preset=gspo"], ["--grpo.preset=gspo", "--grpo.epsilon_high=0.5"]):
        typed = parsed(tmp_path, "--config", "recipe", *order, recipe=recipe)
        assert (typed.loss_type, typed.epsilon_high, typed.importance) == ("grpo", 0.5, "sequence")
    beside = parsed(tmp_path, "--config", "recipe", recipe={"preset": "gspo", **recipe})
    assert (beside.loss_type, beside.epsilon_high, beside.importance) == ("dr_grpo", 0.3, "sequence")
    assert beside == GrpoConfig(preset="gspo", **recipe)


def test_another_preset_takes_back_what_the_first_had_set(tmp_path):
    both = parsed(
        tmp_path, "--config", "first", "--config", "second", first={"preset": "gspo"}, second={"preset": "sapo"}
    )
    assert both == GrpoConfig(preset="sapo") and both.importance == "token" and both.epsilon_low == 0.2
    # A run's own file has every field.
    whole = to_dict(build(TrainConfig, {"grpo": {"preset": "gspo", "num_iterations": 2}, "rewards": TWO}))["grpo"]
    assert parsed(tmp_path, "--config", "whole", whole=whole) == GrpoConfig(preset="gspo", num_iterations=2)
    again = parsed(tmp_path, "--config", "whole", "--grpo.preset", "sapo", whole=whole)
    assert again == GrpoConfig(preset="sapo", num_iterations=2)


def test_what_a_preset_sets_and_what_was_given_instead_is_said_in_full():
    said = preset_fact(GrpoConfig(preset="dapo", epsilon_high=0.4))
    assert said == (
        "dapo (arXiv:2503.14476, eq. 8 (loss, bounds), 11 (sampling), 13 (length)): loss_type dapo, dynamic_sampling"
        " true, overlong_buffer 0.2; given: epsilon_high 0.4, not 0.28"
    )


def test_a_buffer_below_one_is_a_share_of_the_longest_completion():
    shares = [GrpoConfig(overlong_buffer=buffer).overlong_tokens(500) for buffer in (0, 102, 0.2, 1e-9)]
    assert shares == [0, 102, 100, 0]
