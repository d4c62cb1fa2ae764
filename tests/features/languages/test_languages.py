"""What is measured of the completions of each language, and the reward for the prompt's language."""

from types import SimpleNamespace

import pytest
import torch

from hybrid_grpo.config import RewardConfig, TrainConfig, build
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores
from hybrid_grpo.features.languages.languages import Languages
from hybrid_grpo.records.metrics.meter import Meter
from hybrid_grpo.rewards.loader import load_rewards
from hybrid_grpo.rewards.text import same_language

ENGLISH = "How many apples are left if I give three of my ten apples to my sister?"
GERMAN = "Wie viele Äpfel bleiben übrig, wenn ich drei von meinen zehn Äpfeln meiner Schwester gebe?"
CHINESE = "如果我把十个苹果中的三个给我妹妹,还剩下多少个苹果?"
ARABIC = "كم تفاحة تبقى إذا أعطيت أختي ثلاث تفاحات من عشر تفاحات لدي؟"
SHORT = "3 + 4 = 7"


def feature_of(prompts=(), **settings):
    config = build(TrainConfig, {"languages": settings, "rewards": ["exact_match"]})
    return Languages(config, None, SimpleNamespace(outcome="right", prompts=prompts))


def rollout_of(texts, answers):
    prompts = [
        Prompt(0, texts[0], [1], {"lang": "en"}),
        Prompt(1, [{"role": "system", "content": ENGLISH}, {"role": "user", "content": texts[1]}], [1], {"lang": "de"}),
        Prompt(2, texts[2], [1], {"lang": "fr"}),
    ]
    completions = [Completion([1] * n, [-1.0] * n, "stop", text) for text, n in answers]
    return Rollout(prompts, completions, 2)


ANSWERS = [(ENGLISH, 4), (GERMAN, 2), (GERMAN, 3), (SHORT, 5), (SHORT, 1), (SHORT, 1)]


@pytest.mark.parametrize("column", [None, "lang"])
def test_each_language_has_its_own_numbers(column):
    feature = feature_of(names=["en", "de"], column=column)
    rollout = rollout_of((ENGLISH, GERMAN, SHORT), ANSWERS)
    right_B = torch.tensor([1.0, 0.0, 1.0, 1.0, float("nan"), 0.0]).double()
    numbers = feature.measure(rollout, Scores(right_B, {"right": right_B}, {"right": torch.zeros(6)}))
    meter = Meter(["right"], features=feature.names)
    meter.update(numbers)
    measured = meter.reduce()
    expected = {
        **{"en/prompts": 1, "en/accuracy": 0.5, "en/length_mean": 3, "en/same_frac": 0.5},
        **{"de/prompts": 1, "de/accuracy": 1, "de/length_mean": 4, "de/same_frac": 1},
        **{"other/prompts": 1, "other/accuracy": 0, "other/length_mean": 1},
    }
    assert {name[9:]: value for name, value in measured.items() if name.startswith("language/")} == expected


def test_a_missing_column_is_named_with_its_row_before_a_model_loads():
    """It was first looked for when the completions of the first step were measured."""
    with pytest.raises(UserError, match=r"languages\.column tongue: row 1 of the data has no such column: add it"):
        feature_of([Prompt(0, SHORT, [1], {"tongue": "en"}), Prompt(1, SHORT, [1], {})], names=["en"], column="tongue")


def test_a_code_may_be_written_in_several_ways_and_a_name_is_no_code():
    """`EN` and `en-US` counted as another language than en, and `English` did so without a word."""
    written = ["en", "EN", "en-US", "fr", "other", None]
    prompts = [Prompt(row, SHORT, [1], {"lang": code}) for row, code in enumerate(written)]
    feature = feature_of(prompts, names=["en"], column="lang")
    assert list(map(feature.language_of, prompts)) == ["en", "en", "en", "other", "other", "other"]
    assert same_language([SHORT] * 4, [ENGLISH] * 4, ["EN", "en-US", "en", "de-AT"]) == [1.0, 1.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="'English' is not the code of a language: write a code of ISO 639-1, such as"):
        same_language([SHORT], [ENGLISH], ["English"])
    named = [Prompt(7, SHORT, [1], {"lang": "English"})]
    with pytest.raises(UserError, match=r"languages\.column lang: row 7: 'English' is not the code of a l"):
        feature_of(named, names=["en"], column="lang")
    # Where all languages are given, the names that the column uses serve as well.
    assert feature_of(named, names=["English"], column="lang").language_of(named[0]) == "English"
    for name in ("English", "EN"):
        with pytest.raises(UserError, match=rf"languages\.names {name} is not a code .* or set languages\.column"):
            feature_of(names=[name])


def test_the_reward_is_for_the_language_of_the_prompt():
    texts = [ENGLISH, GERMAN, CHINESE, ARABIC]
    for asked in texts:
        chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": SHORT}]
        assert same_language([asked] * 5, [*texts, SHORT]) == [*(float(text == asked) for text in texts), None]
        assert same_language([chat], [[{"role": "assistant", "content": asked}]]) == [1.0]
    # The column decides where there is one.
    assert same_language([ENGLISH, SHORT, SHORT], [GERMAN, GERMAN, GERMAN], ["de", "zh", None]) == [1.0, 0.0, None]


def test_a_missing_package_is_named_before_a_model_loads(monkeypatch):
    for module in ("hybrid_grpo.rewards.loader", "hybrid_grpo.features.languages.settings"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"rewards\[0\] same_language needs py3langid: pip install it, or take the"):
        load_rewards([RewardConfig("same_language")])
    config = build(TrainConfig, {"languages": {"names": ["en"]}, "rewards": ["exact_match"]})
    with pytest.raises(UserError, match=r"languages\.names needs py3langid"):
        config.languages.check_place(config, 1)
