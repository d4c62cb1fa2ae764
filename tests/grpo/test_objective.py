"""A user's own loss, found and tried before a model loads."""

import pytest
import torch
from paths import ROOT

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.grpo.objective import load_objective

EXAMPLES = f"{ROOT}/training_scripts/objectives"


def reinforce(logp_bT, old_logp_bT, advantages_bT, weight_bT, grpo, **others):
    return -(weight_bT * advantages_bT * logp_bT).sum()


def per_token(logp_bT, old_logp_bT, advantages_bT, weight_bT, grpo, **others):
    return -weight_bT * advantages_bT * logp_bT


def mean_of_real(logp_bT, old_logp_bT, advantages_bT, weight_bT, grpo, **others):
    return -logp_bT[weight_bT > 0].mean()


def without_gradient(logp_bT, old_logp_bT, advantages_bT, weight_bT, grpo, **others):
    return (weight_bT * logp_bT.detach()).sum()


def of_old_arguments(logp_bT, advantages_bT):
    return -(advantages_bT * logp_bT).sum()


class Scaled:
    def __call__(self, *tensors, **others):
        return reinforce(*tensors) + torch.rand(()) * tensors[0].sum()


def refuse(*_):
    raise AssertionError("memory would be taken on every GPU")


@pytest.mark.parametrize("objective", [reinforce, Scaled()])
def test_a_loss_that_learns_is_taken_as_it_is(objective, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", refuse)
    torch.manual_seed(0)
    assert load_objective(GrpoConfig(objective=objective)) is objective
    after = torch.rand(())
    torch.manual_seed(0)
    assert after == torch.rand(()), "a loss that draws changes nothing by being tried"


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": f"{EXAMPLES}/vespo.py:vespo", "sampler_correction": "mask"},
        {"objective": reinforce, "tokens": "kl_cov", "drift_coef": 1.0},
        {"objective": f"{EXAMPLES}/dro.py:dro", "beta": 0.1, "kl_in": "reward"},
        {"objective": f"{EXAMPLES}/a2po.py:a2po", "beta": 0.1, "whole_groups": True},
        {"objective": f"{EXAMPLES}/tpo.py:tpo", "whole_groups": True},
    ],
    ids=["vespo", "kl_cov", "dro", "a2po", "tpo"],
)
def test_every_example_can_be_tried(settings):
    assert load_objective(GrpoConfig(**settings)) is not None


@pytest.mark.parametrize("settings, why", [
    ({"objective": per_token}, r"per_token, tried on two completions, returned tensor.*: return a finite scalar"),
    ({"objective": mean_of_real}, r"mean_of_real, tried on a row of padding, returned tensor\(nan"),
    ({"objective": without_gradient}, r"without_gradient, tried on .* returned .*scalar tensor with a gradient$"),
    ({"objective": of_old_arguments}, r"of_old_arguments has \['advantages_bT'\] in another place: its .* \['logp_b"),
    (
        {"objective": f"{EXAMPLES}/dro.py:dro"},
        r"dro.py:dro, tried on .* raised TypeError: .*\(dro.py:\d+\); ref_logp_bT is None .*: set grpo.beta$",
    ),
    ({"objective": f"{EXAMPLES}/tpo.py:tpo"}, r"tpo.py:tpo has an argument group_b, which takes grpo.whole_groups"),
    ({"objective": f"{EXAMPLES}/tpo.py:tpa"}, r"tpo.py:tpa: .*tpo.py has no function tpa: did you mean tpo"),
    ({"objective": "tpo"}, r"tpo: give path/to/file.py:name or package.module:name"),
])  # fmt: skip
def test_a_loss_that_cannot_learn_is_refused(settings, why):
    with pytest.raises(UserError, match=rf"^grpo.objective .*{why}") as error:
        load_objective(GrpoConfig(**settings))
    assert "\n" not in str(error.value)


def test_a_loss_that_takes_no_groups_is_refused_with_whole_groups():
    with pytest.raises(UserError, match=r"^grpo.whole_groups true tells the loss its groups, and .* no argument"):
        load_objective(GrpoConfig(objective=lambda logp_bT: logp_bT.sum(), whole_groups=True))
