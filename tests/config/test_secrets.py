"""Secrets stay out of what is written, and away from reward functions."""

import pytest
import yaml
from reward_helpers import isolated, rows

from hybrid_grpo.config import RewardConfig, TrainConfig, build, dump, to_dict
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed.workers.processes import hidden_variables
from hybrid_grpo.records.publishing.redaction import publishable, publishable_text


@pytest.mark.parametrize("name, seen", [
    *[(name, False) for name in ("WANDB_API_KEY", "HF_TOKEN", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD")],
    *[(name, False) for name in ("AWS_ACCESS_KEY_ID", "my_secret", "SSH_KEY", "PGPASSWORD", "OPENAI_APIKEY")],
    *[(name, True) for name in ("PATH", "TOKENIZERS_PARALLELISM", "HF_HOME", "KEYBOARD", "MONKEY", "LD_LIBRARY_PATH")],
])  # fmt: skip
def test_which_variables_look_like_secrets(name, seen):
    assert (name not in hidden_variables([name], set())) is seen
    assert not hidden_variables([name], {name})


def test_a_secret_argument_is_in_nothing_that_is_written_down():
    kwargs = {"api_key": "s3cret", "end_token": "</s>", "token_env": "MY_TOKEN", "key": "answer", "password": "s3cret"}
    config = build(TrainConfig, {"rewards": [{"function": "mine.py:f", "kwargs": kwargs}]})
    assert config.rewards[0].kwargs == kwargs
    shown = {**kwargs, "api_key": "***", "password": "***"}
    assert to_dict(config)["rewards"][0]["kwargs"] == shown
    assert yaml.safe_load(dump(config))["rewards"][0]["kwargs"] == shown
    with pytest.raises(UserError, match=r"kwargs api_key has \*\*\*, as a run's config.yaml has it"):
        build(TrainConfig, yaml.safe_load(dump(config)))


LONG = "aB3-" * 10
SECRETS = {
    "hub token": f"hf_{LONG}", "GitHub, fine-grained": f"github_pat_{LONG}", "GitLab": f"glpat-{LONG}",
    "Slack": f"xoxb-{LONG}", "Slack hook": "https://hooks.slack.com/services/T000/B000/s3cret",
    "Google": "AIza" + "x" * 35, "JSON web token": f"eyJ{LONG}.eyJ{LONG}.s3cret", "PyPI": f"pypi-{LONG}",
    "npm": f"npm_{LONG}", "header": "Authorization: Basic dXNlcjpzM2NyZXQ=", "bearer": "bearer s3cret",
    "login": "https://user:s3cret@example.org/data.jsonl", "query": "https://example.org/data.jsonl?sig=s3cret&part=1",
    "assignment": "OPENAI_API_KEY=s3cret",
    "key file": "-----BEGIN RSA PRIVATE KEY-----\ns3cret\n-----END RSA PRIVATE KEY-----",
}  # fmt: skip


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_in_any_text_setting_is_masked_wherever_settings_are_written(kind):
    secret = SECRETS[kind]
    given = {"log": {"wandb_project": f"see {secret} there"}, "data": {"path": f"x {secret}"}}
    for text in (dump(config := build(TrainConfig, given)), str(to_dict(config)), str(publishable(given))):
        assert "s3cret" not in text and LONG not in text and "x" * 35 not in text and "***" in text
    assert config.log.wandb_project == given["log"]["wandb_project"]


def test_secrets_at_any_depth_of_arguments_are_masked_and_asked_for_again():
    inner = {"headers": {"Authorization": "Token s3cret", "X-Api-Key": "s3cret"}, "logins": [{"password": 7351}]}
    kwargs = {"client": {**inner, "url": "http://me:s3cret@host/"}, "token": {"name": "s3cret"}, "limit": 7351}
    for section in ({"rewards": [{"function": "mine.py:f", "kwargs": kwargs}]}, {"rollout": {"tools": [
        {"function": "mine.py:f", "kwargs": kwargs}]}}):  # fmt: skip
        text = dump(build(TrainConfig, section))
        assert "s3cret" not in text and text.count("7351") == 1
    stored = yaml.safe_load(dump(build(TrainConfig, {"rewards": [{"function": "mine.py:f", "kwargs": kwargs}]})))
    given = stored["rewards"][0]["kwargs"]
    for repaired, asked in [
        (inner["headers"], "client.headers.Authorization"),
        (inner["logins"], "client.logins.password"),
        (kwargs["client"]["url"], "client.url"),
        (kwargs["token"], "token.name"),
    ]:
        with pytest.raises(UserError, match=rf"kwargs {asked.partition('.')[0]} has \*\*\*"):
            build(TrainConfig, stored)
        *path, last = asked.split(".")
        if path == ["client"]:
            given["client"][last] = repaired
        elif path[0] == "client":
            given["client"][path[1]] = repaired
        else:
            given["token"] = repaired
    assert build(TrainConfig, stored).rewards[0].kwargs == kwargs


@pytest.mark.parametrize("shown", [
    *("https://example.org/a/b", "some/model", "runs/a/b.jsonl", "1/2 and 3/4", "a </think> tag", "/no_think"),
    "<think>/<answer>/<end>",
    *("sk-learn", "a ***bold*** word", "email me@example.org", "max_tokens=5", "the token = a word"),
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
