"""Agents with a tiny model: what they ask for over HTTP is sampled, recorded and trained on as it was read."""

import json
import shutil
from collections import Counter
from types import SimpleNamespace

import agents
import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import SUPPORT
from tiny_models import build, tiny_config
from tool_tokenizers import FAMILIES, tool_tokenizer

from hybrid_grpo.config import DataConfig, RolloutConfig, ScoringConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.completion import Prompt
from hybrid_grpo.data.completion_records import completion_of, record_of
from hybrid_grpo.generation import Callbacks, stream_key
from hybrid_grpo.generation.rollout import complete, request_of, sampling_of
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.turns.agents.in_worker import AgentEntry
from hybrid_grpo.turns.agents.protocol import Ask, Refused, read
from hybrid_grpo.turns.agents.sessions import Agents

AGENTS = SUPPORT / "agents.py"
MODELS = {
    "qwen2": ("llama", "hermes"),
    "windows and sinks": ("gpt_oss", "llama3"),
    "states": ("qwen3_5_text", "hermes"),
}


def agents_of(name, family="hermes", **more):
    """The agents of a function or a command line, the tokenizer, and the settings."""
    agent = name if " " in name or ":" in name else f"{AGENTS}:{name}"
    limits = {"max_completion_tokens": 60, "max_turn_tokens": 10, "max_turns": 12, "max_total_tokens": 400}
    rollout = RolloutConfig(**{"agent": agent, "agent_timeout_s": 60, **limits, **more})
    tokenizer = tool_tokenizer(family)
    config = SimpleNamespace(rollout=rollout, data=DataConfig(), scoring=ScoringConfig(workers=2))
    return Agents(config, tokenizer, (tokenizer.eos_token_id,)), tokenizer, rollout


def sampled(played, model, rows, size=2, seed=0, seen=None):
    """The completions of rows, group after group, with two ranks' worth of slots."""
    turns, tokenizer, rollout = played
    requests = []
    for number, row in enumerate(rows):
        columns = {name: value for name, value in row.items() if name != "prompt"}
        prompt = Prompt(number, row["prompt"], [1, 2], columns)
        requests.append(request_of(prompt, rollout, [stream_key(seed, number, k) for k in range(size)]))
    callbacks = Callbacks(None if seen is None else lambda *of: seen.append(of[:2]), turns=turns)
    groups, stats = complete(
        model, tokenizer, requests, sampling_of(rollout, (tokenizer.eos_token_id,)), callbacks=callbacks, config=rollout
    )
    return [completion for group in groups for completion in group], stats


def model_of(architecture, tokenizer, attention=ATTENTION):
    return build(tiny_config(architecture, vocab_size=len(tokenizer)), attention)


@pytest.mark.process
@pytest.mark.parametrize("kind", MODELS)
def test_every_history_is_what_training_reads_whatever_the_memory(kind):
    """Forgotten, split and continued histories: each token's log-probability is that of one forward over the whole
    history, in which no page is shared; a cache of a few pages, which preempts, changes nothing."""
    architecture, family = MODELS[kind]
    rows, found = agents.rows(["splits", "talks", "tools", "forgets"][: 2 if kind == "states" else 4]), []
    for more in ({"max_completion_tokens": 300}, {"max_completion_tokens": 300, "max_slots": 3, "cache_gb": 0.00014}):
        played, seen = agents_of("acts", family, **more), []
        model = model_of(architecture, played[1])
        completions, stats = sampled(played, model, rows, seen=seen)
        assert sorted(seen) == [(row, k) for row in range(len(rows)) for k in range(2)]
        found.append(completions)
    assert stats.preempted or architecture == "qwen3_5_text"
    plain, kinds = model_of(architecture, played[1], "eager"), Counter()
    for one, other in zip(*found, strict=True):
        assert (one.token_ids, one.observations, one.histories) == (
            other.token_ids,
            other.observations,
            other.histories,
        )
        assert completion_of(json.loads(json.dumps(record_of(one)))) == one
        assert one.episode.failure is None and one.messages[-1]["role"] == "assistant"
        kinds[len(one.histories)] += 1
        rows_of, logp = one.token_rows(0, []), []
        for row in rows_of:
            with torch.no_grad():
                of = plain(torch.tensor([row.prompt + row.completion]), use_cache=False).logits[0].log_softmax(-1)
            logp += [float(of[len(row.prompt) + t - 1, row.completion[t]]) for t in row.targets]
            assert row.first == len(logp) - len(row.targets)
        assert logp == pytest.approx(one.logp, abs=1e-4 if kind == "states" else 2e-5)
        assert [row.completion[t] for row in rows_of for t in row.targets] == one.token_ids
    assert kinds[1] and max(kinds) > 3, "some continue, others branch"


@pytest.mark.process
def test_an_episode_that_fails_fails_alone(capfd):
    hows = ["raises", "exits", "hangs", "text", "nothing", "talks"]
    played = agents_of("acts", agent_timeout_s=3)
    completions, _ = sampled(played, model_of("llama", played[1]), agents.rows(hows), size=1)
    failures = dict(zip(hows, (completion.episode.failure for completion in completions), strict=True))
    assert failures["nothing"] is None and failures["talks"] is None
    says = {"raises": "ValueError: no luck", "exits": "exit status 3", "hangs": "took longer", "text": "returned a str"}
    for how, part in says.items():
        assert part in failures[how]
    nothing = completions[hows.index("nothing")]
    assert not nothing.learned and nothing.episode.total == 1.0 and len(nothing.token_ids) == 1
    assert "no luck" in capfd.readouterr().err
    assert played[0].numbers(SimpleNamespace(completions=completions))["agent/failed_frac"] == (4 / 6, 6)


@pytest.mark.process
@pytest.mark.parametrize("how", ["writes_tokens", "waits", "program"])
def test_others_ways_to_ask(how, tmp_path):
    """From tokens to tokens; streams, lists of models and log-probabilities; a program in another language."""
    agent = how
    if how == "program":
        if shutil.which("node") is None:
            pytest.skip("no node")
        (tmp_path / "agent.js").write_text(agents.PROGRAM)
        agent = f"node {tmp_path / 'agent.js'}"
    played = agents_of(agent)
    completions, _ = sampled(played, model_of("llama", played[1]), agents.rows(["talks"] * 2))
    assert [completion.episode.failure for completion in completions] == [None] * 4
    assert all(completion.episode.total > 0 or how == "waits" for completion in completions)
    if how == "writes_tokens":
        assert [len(completion.token_ids) for completion in completions] == [c.episode.total for c in completions]
        assert {completion.histories for completion in completions} == {(0,)}, "tokens that continue are one history"


@pytest.mark.process
def test_roles_and_replies_have_rewards_of_their_own():
    """A role's is for its turns in a chat that others speak in too; a reply's also for what it read and was sampled."""
    played = agents_of("rewards_parts")
    rows = agents.rows(["roles", "tree", "root", "nobody"])
    roles, tree, root, nobody = sampled(played, model_of("llama", played[1]), rows, size=1)[0]
    assert completion_of(json.loads(json.dumps(record_of(tree)))) == tree
    white, black = roles.episode.parts
    ends = [place for place, _ in roles.observations[1:]] + [len(roles.token_ids)]
    assert roles.histories == (0,) and roles.episode.total == 0.5
    assert white.spans == ((0, ends[0], 1.0), (ends[1], ends[2], 1.0)) and black.spans == ((ends[0], ends[1], 1.0),)
    # The second continues the chat's history, the first begins like it, and the third like all but two of its tokens.
    third, second = (tree.observations[start][0] for start in tree.histories[:0:-1])
    root_of, shared, of = tree.observations[1][0], tree.observations[1][0] - 2, len(tree.token_ids)
    by_reward = {part.reward: part.spans for part in tree.episode.parts}
    head = ((0, shared, 1 / 3), (shared, root_of, 1 / 2))
    assert by_reward == {
        0.0: (*head, (second, third, 1.0)),
        1.0: (*head, (root_of, second, 1.0)),
        2.0: (head[0], (third, of, 1.0)),
    }
    of_root = next(part.spans for part in root.episode.parts if part.reward == 9.0)
    assert of_root == (
        (0, root.observations[1][0] - 2, 1 / 4),
        (root.observations[1][0] - 2, root.observations[1][0], 1 / 3),
    )
    assert "neither a model that it named nor the id of a reply" in nobody.episode.failure


@pytest.mark.process
def test_what_is_read_again_is_counted():
    """Of 104 and 120 tokens 64 and 80 are known; a model with states reads them again."""
    for architecture, again, tokens in (("llama", 0, 176), ("qwen3_5_text", 144, 320)):
        played = agents_of("branches")
        [completion], _ = sampled(played, model_of(architecture, played[1]), agents.rows(["talks"]), size=1)
        assert completion.histories == (0, 1, 2)
        rollout = SimpleNamespace(completions=[completion])
        assert played[0].numbers(rollout)["agent/read_again_frac"] == (again / tokens, tokens)


@pytest.mark.process
def test_limits_end_an_episode_as_cut():
    for limits in ({"max_turns": 2}, {"max_completion_tokens": 12}, {"max_total_tokens": 90}):
        played = agents_of("acts", **limits)
        completions, _ = sampled(played, model_of("llama", played[1]), agents.rows(["talks"], turns=40))
        assert {completion.finish for completion in completions} == {"length"}
        assert all("Error" in completion.episode.failure for completion in completions)
        assert max(len(completion.token_ids) for completion in completions) <= played[2].max_completion_tokens


@pytest.mark.process
def test_nobody_else_is_answered():
    """Without the key of an episode, by a web page, or outside of a rollout."""
    played = agents_of("acts")
    sampled(played, model_of("llama", played[1]), agents.rows(["talks"]), size=1)
    url, body = played[0]._endpoint.url, {"messages": [{"role": "user", "content": "a"}]}
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    for headers, status in (
        ({}, 401), ({"Authorization": "Bearer x"}, 401), ({"Host": "example.org"}, 403), ({"Origin": url}, 403),
    ):  # fmt: skip
        asked = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)
        assert asked.status_code == status and asked.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/models").status_code == 401


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = ["messages", "tools", "role", "content", "tool_calls", "function", "name", "arguments", "id", "token_ids"]
NAMES += ["sampling_params", "temperature", "n", "stop", "stop_token_ids", "max_tokens", "tool_choice"]
NAMES += ["response_format"]
BODIES = st.dictionaries(st.sampled_from(NAMES), JSON | st.dictionaries(st.sampled_from(NAMES), JSON), max_size=6)


@settings(max_examples=300, deadline=None)
@given(BODIES)
def test_whatever_the_body_it_is_read_or_refused(body):
    for path in ("/v1/chat/completions", "/inference/v1/generate"):
        try:
            assert isinstance(read(path, body, RolloutConfig(), [2], 9), Ask)
        except Refused as refusal:
            assert refusal.status_code == 400 and str(refusal)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"temperature": 0.2}, "temperature 0.2 is not that of the run: leave it out, or 1.0"),
        ({"stop": ["x"]}, "rollout.stop_strings"), ({"n": 2}, "n 2 is not supported"),
        ({"tool_choice": "required"}, "tool_choice is auto or none"), ({"max_tokens": 0}, "max_tokens 0 is not"),
        ({"messages": []}, "at least one message"), ({"temperature": 1, "top_k": -1, "n": 1}, None),
    ],
)  # fmt: skip
def test_what_would_change_the_distribution_is_refused(asked, says):
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], **asked}
    if says is None:
        assert read("", body, RolloutConfig(), [], 0).chat == [{"role": "user", "content": "a"}]
        return
    with pytest.raises(Refused, match=says):
        read("", body, RolloutConfig(), [], 0)


def test_what_is_no_agent_is_refused():
    with pytest.raises(UserError, match="is called with a task and a client"):
        AgentEntry(f"{AGENTS}:forgets_its_client").load("rollout.agent")
    assert set(FAMILIES) >= {family for _, family in MODELS.values()}
