"""Features of the user's own, and the one of the examples."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.building import build, dump, to_dict
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.user_code import import_object
from hybrid_grpo.run.feature import Feature, Features, make_features
from hybrid_grpo.run.settings import changes, settings_of

EXAMPLE = Path(__file__).parents[2] / "examples/own_feature.py"


def config_of(*features: object) -> TrainConfig:
    settings = {"policy": {"model": "m"}, "data": {"path": "d"}, "rewards": ["exact_match"]}
    return build(TrainConfig, {**settings, "features": list(features)})


def made(*features: object) -> list[Feature]:
    return make_features(config_of(*features), None, SimpleNamespace())


class Nameless(Feature):
    pass


class Loader(Feature):
    name = "loader"


class Own(Feature):
    name = "own"


@pytest.mark.parametrize("features, message", [
    ([Nameless], "features .*Nameless has no name: set `name` in its class"),
    ([Loader], "the name loader is taken"),
    ([Own, Own], "the name own is taken"),
    ([lambda *run: 3], "does not make a Feature: derive it from hybrid_grpo.run.feature.Feature"),
    ([f"{EXAMPLE}:EntropyTarge"], "no function EntropyTarge: did you mean EntropyTarget"),
    (["nowhere.py:F"], "there is no file"),
    (["own"], "give path/to/file.py:name or package.module:name"),
])  # fmt: skip
def test_features_that_cannot_be_are_refused_in_a_line(features, message):
    with pytest.raises(UserError, match=message) as error:
        made(*features)
    assert "\n" not in str(error.value)


def test_settings_name_features_and_a_resumed_run_knows_when_they_change():
    config = config_of(f"{EXAMPLE}:EntropyTarget", Own)
    names = [f"{EXAMPLE}:EntropyTarget", to_dict(config)["features"][1]]
    assert names[1].endswith("Own")
    assert f"- {EXAMPLE}:EntropyTarget" in dump(config)
    assert settings_of(config)["features"] == names
    assert list(changes(settings_of(config_of()), config)) == ["features"]


def test_own_features_come_after_the_built_in_ones():
    example, own = made(f"{EXAMPLE}:EntropyTarget", Own)
    assert Features([example, own]).states == {"entropy_target": example}


def test_the_entropy_target_pushes_entropy_towards_the_target_and_keeps_its_coefficient():
    make = import_object(f"{EXAMPLE}:EntropyTarget", "features")
    feature = make(None, None, None)
    weight_bT = torch.tensor([[0.5, 0.5, 0.0]])
    batch = SimpleNamespace(weight_bT=weight_bT)

    def step(entropy: float) -> torch.Tensor:
        entropy_bT = torch.tensor([[entropy, entropy, float("nan")]], requires_grad=True)
        loss, numbers = feature.loss(batch).value(torch.zeros(1, 3), entropy_bT, [])
        loss.backward()
        assert numbers == {"feature/entropy_coef": (before, 1)}
        feature.stepped()
        return entropy_bT.grad

    before = feature.coef
    assert before == 0.0 and not step(feature.target - 1).any()
    before = feature.coef
    assert before == feature.change
    # The loss falls as the entropy rises, by the weight of each token, and by nothing on padding.
    torch.testing.assert_close(step(feature.target - 1), -before * weight_bT)
    other = make(None, None, None)
    other.load_state_dict(feature.state_dict())
    assert other.coef == feature.coef == 2 * feature.change
    for _ in range(3):
        before = feature.coef
        step(feature.target + 1)
    assert feature.coef == 0.0  # it never rewards a lower entropy
