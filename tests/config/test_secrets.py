"""Secrets stay out of what is written, and away from reward functions."""

import pytest
import yaml
from reward_helpers import isolated, rows

from hybrid_grpo.config import RewardConfig, TrainConfig, build, dump, to_dict
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.secrets import public_environment, publishable, publishable_text


@pytest.mark.parametrize("name, seen", [
    *[(name, False) for name in ("WANDB_API_KEY", "HF_TOKEN", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD")],
    *[(name, False) for name in ("AWS_ACCESS_KEY_ID", "my_secret", "SSH_KEY", "PGPASSWORD", "OPENAI_APIKEY")],
    *[(name, True) for name in ("PATH", "TOKENIZERS_PARALLELISM", "HF_HOME", "KEYBOARD", "MONKEY", "LD_LIBRARY_PATH")],
])  # fmt: skip
def test_which_variables_look_like_secrets(name, seen):
    assert (name in public_environment({name: "x"}, set())) is seen
    assert name in public_environment({name: "x"}, {name})


def test_a_secret_argument_is_in_nothing_that_is_written_down():
    kwargs = {"api_key": "s3cret", "end_token": "</s>", "token_env": "MY_TOKEN", "key": "answer", "password": "s3cret"}
    config = build(TrainConfig, {"rewards": [{"function": "mine.py:f", "kwargs": kwargs}]})
    assert config.rewards[0].kwargs == kwargs
    shown = {**kwargs, "api_key": "***", "password": "***"}
    assert to_dict(config)["rewards"][0]["kwargs"] == shown
    assert yaml.safe_load(dump(config))["rewards"][0]["kwargs"] == shown
    with pytest.raises(UserError, match=r"kwargs api_key is \*\*\*, as a run's config.yaml has it"):
        build(TrainConfig, yaml.safe_load(dump(config)))


@pytest.mark.parametrize("shown", [
    *("https://example.org/a/b", "some/model", "runs/a/b.jsonl", "1/2 and 3/4", "a </think> tag", "/no_think"),
    "<think>/<answer>/<end>",
    "sk-learn",
])  # fmt: skip
def test_what_is_no_secret_is_published_as_it_is(shown):
    assert publishable(shown) == shown and publishable_text(shown) == shown
    assert publishable({"stop_ids": [1, None, shown]}) == {"stop_ids": [1, None, shown]}


@pytest.mark.process
def test_what_workers_see_of_the_environment(tmp_path, monkeypatch):
    """Of four secrets the one that scoring.secrets names, and the one that the function's own argument names."""
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_TOKEN", "OTHER_TOKEN", "PLAIN"):
        monkeypatch.setenv(name, "x")
    (tmp_path / "mine.py").write_text(
        "import os\nNAMES = 'HF_TOKEN', 'WANDB_API_KEY', 'MY_TOKEN', 'OTHER_TOKEN', 'PLAIN'\n"
        "def f(completions, token_env): return [float(sum(2**i for i, n in enumerate(NAMES) if n in os.environ))]\n"
    )
    config = RewardConfig(f"{tmp_path}/mine.py:f", kwargs={"token_env": "MY_TOKEN"})
    scores = isolated(config, secrets=["OTHER_TOKEN"]).score(*rows("a"))
    assert scores.reward_B.tolist() == [4.0 + 8.0 + 16.0]
