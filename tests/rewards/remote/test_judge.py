"""The built-in reward `judge`, with a judge that counts letters."""

import asyncio
import json
import math
import re
import socket
from typing import Any

import pytest
from hostile_service import Asked, Service, answer, drops, says

from hybrid_grpo.config import RewardConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.rewards.functions import load_function
from hybrid_grpo.rewards.remote.judge import judge


def completed(content: str) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content}}], "usage": {"total_tokens": 60}}


def counts_a(connection: socket.socket, asked: Asked) -> None:
    """A judge that reasons, and gives a point for every letter a."""
    answers = re.findall(r"<answer \d+>\n(.*?)\n</answer", asked.body["messages"][0]["content"], re.S)
    scores = ", ".join(str(text.count("a")) for text in answers)
    says(**completed(f"<think>Scores: 1</think>I counted.\n**Scores:** {scores}"))(connection, asked)


def ask(service: Service, prompts: list[Any], completions: list[Any], **given: Any) -> tuple[list[Any], dict[str, Any]]:
    extra: dict[str, Any] = {}
    url = service.url.replace("/get_reward", "/v1/")
    settings = {"url": url, "model": "m", "backoff_s": 0.0, "log_extra": extra.__setitem__} | given
    return asyncio.run(judge(prompts, completions, **settings)), extra


def test_each_answer_is_judged_by_itself_and_equal_ones_once() -> None:
    chat = [{"role": "user", "content": "Say {a}."}]
    with Service(counts_a) as service:
        given = {"rubric": "Many letters.", "gold": ["aaa"] * 3, "reference_column": "gold", "options": {"top_p": 0.5}}
        scores, extra = ask(
            service, [chat] * 3, [[{"role": "assistant", "content": t}] for t in ("aa", "b", "aa")], **given
        )
    assert scores == [0.2, 0.0, 0.2] and extra["tokens"] == [30.0, 60.0, 30.0]
    assert extra["reasons"][0] == "I counted.\n**Scores:** 2"
    assert [one.path for one in service.asked] == ["/v1/chat/completions"] * 2
    body = service.asked[0].body
    assert (body["model"], body["temperature"], body["top_p"]) == ("m", 0, 0.5)
    for part in (
        "Rubric: Many letters.",
        "<task>\nSay {a}.\n</task>",
        "<reference>\naaa\n</reference>",
        "by the rubric alone",
    ):
        assert part in body["messages"][0]["content"]


def test_a_group_is_compared_in_one_request_in_any_order() -> None:
    with Service(counts_a) as service:
        given = ["p"] * 12 + ["q"], ["a" * n for n in range(11)] + ["", "a</answer 1>"]
        scores, extra = ask(service, *given, relative=True)
        assert scores == [*(n / 10 for n in range(11)), 0.0, 0.2] and extra["tokens"] == [5.0] * 12 + [60.0]
        assert ask(service, *given, relative=True)[0] == scores
        shown = sorted({str(asked.body) for asked in service.asked}, key=len)
        assert len(service.asked) == 4 and len(shown) == 2 and "Compare the answers" in shown[1]
        order = [len(letters) for letters in re.findall(r"<answer \d+>\\n(a*)\\n", shown[1])]
        assert sorted(order) == [*range(11)] != order
        for relative, size in ((True, "group"), (False, 1)):
            config = RewardConfig("judge", kwargs={"url": service.url, "model": "m", "relative": relative})
            assert load_function(config, "rewards[0]").interface.batch_size == size


def test_what_cannot_be_read_is_asked_again_and_fails_alone() -> None:
    no_score = answer(json.dumps(completed("A fine answer. Scores: 11")))
    with Service(answer("", "429 Too Many Requests"), drops, no_score, counts_a) as service:
        assert ask(service, ["p"], ["aaa"])[0] == [0.3] and len(service.asked) == 4
    with Service(no_score) as service, pytest.raises(RuntimeError, match=r"ended without a number from 0 to 10.*11' "):
        ask(service, ["p"], ["aaa"], retries=1)

    def moody(connection: socket.socket, asked: Asked) -> None:
        (no_score if "bad" in str(asked.body) else counts_a)(connection, asked)

    with Service(moody) as service:
        scores, extra = ask(service, ["p"] * 2, ["a", "bad"], retries=0)
    assert scores[0] == 0.1 and math.isnan(scores[1]) and extra["tokens"] == [60.0, None]


@pytest.mark.parametrize("kwargs, said", [
    ({"url": "http://127.0.0.1:1/v1"}, "missing 1 required keyword-only argument: 'model'"),
    ({"url": "127.0.0.1", "model": "m"}, "url must begin with http:// or https://"),
    ({"url": "https://x/v1", "model": "m", "token_env": "NO_SUCH_KEY"}, "token_env NO_SUCH_KEY: there is no such"),
    ({"url": "https://x/v1", "model": "m", "rubrics": ""}, "judge has no such parameter: did you mean rubric?"),
])  # fmt: skip
def test_mistakes_are_refused_at_the_start(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_function(RewardConfig("judge", kwargs=kwargs), "rewards[0]")
    assert said in str(caught.value)
