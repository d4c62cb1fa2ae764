"""Agents with a tiny model: what they ask for over HTTP is sampled, recorded and trained on as it was read."""

import copy
import json
import shutil
from base64 import b64decode
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import agents
import httpx
import numpy as np
import pytest
import torch
from experts_used import differing, experts_used
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import SUPPORT
from seeing import make_seeing, pictures
from tiny_models import build, tiny_config
from tool_tokenizers import FAMILIES, tool_tokenizer

from hybrid_grpo.config import DataConfig, PolicyConfig, RolloutConfig, ScoringConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.completion import Prompt
from hybrid_grpo.data.completion_records import completion_of, record_of
from hybrid_grpo.data.packing import pack
from hybrid_grpo.data.pictures import ImageStore
from hybrid_grpo.generation import Callbacks, loop, stream_key
from hybrid_grpo.generation.rollout import complete, request_of, sampling_of
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.loading import load_config, load_model
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.reading import TEXT, Reading
from hybrid_grpo.model.routing import Routing, install_routers
from hybrid_grpo.model.sight import VisionEncoder, image_token, load_tower
from hybrid_grpo.model.visual_tokens import keys_of
from hybrid_grpo.turns.agents.in_worker import AgentEntry
from hybrid_grpo.turns.agents.protocol import Ask, Refused, read
from hybrid_grpo.turns.agents.sessions import Agents

AGENTS = SUPPORT / "agents.py"
MODELS = {
    "qwen2": ("llama", "hermes"),
    "windows and sinks": ("gpt_oss", "llama3"),
    "states": ("qwen3_5_text", "hermes"),
}


def agents_of(name, family="hermes", album=None, **more):
    """The agents of a function or a command line, the tokenizer, and the settings."""
    agent = name if " " in name or ":" in name else f"{AGENTS}:{name}"
    limits = {"max_completion_tokens": 60, "max_turn_tokens": 10, "max_turns": 12, "max_total_tokens": 400}
    rollout = RolloutConfig(**{"agent": agent, "agent_timeout_s": 60, **limits, **more})
    tokenizer = tool_tokenizer(family) if album is None else album.processor.tokenizer
    config = SimpleNamespace(rollout=rollout, data=DataConfig(), scoring=ScoringConfig(workers=2))
    return Agents(config, tokenizer, (tokenizer.eos_token_id,), album), tokenizer, rollout


def sampled(played, model, rows, size=2, seed=0, seen=None, reading=TEXT):
    """The completions of rows, group after group, with two ranks' worth of slots."""
    turns, tokenizer, rollout = played
    requests = []
    for number, row in enumerate(rows):
        columns = {name: value for name, value in row.items() if name not in ("prompt", "pictures")}
        prompt = Prompt(number, row["prompt"], [1, 2], columns, pictures=row.get("pictures", ()))
        requests.append(request_of(prompt, rollout, [stream_key(seed, number, k) for k in range(size)]))
    callbacks = Callbacks(None if seen is None else lambda *of: seen.append(of[:2]), turns=turns, reading=reading)
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
def test_experts_and_masks_of_histories_reach_their_agent_and_training(tmp_path):
    """What training replays, and what replies have, is what the sampler used, also in pages of other histories. Rows
    share only what went through the same experts."""
    played = agents_of("branches", logprobs="mask", top_k=7)
    config = tiny_config("qwen3_moe", num_experts=16, num_experts_per_tok=4, vocab_size=len(played[1]))
    model, plain = build(config, ATTENTION), build(config, "eager")
    files = [str(tmp_path / f"{k}.json") for k in range(2)]
    completions, _ = sampled(played, model, [{"prompt": "", "file": file} for file in files], size=1)
    rows = [row for k, completion in enumerate(completions) for row in completion.token_rows(k, [])]
    replies = [reply for file in files for reply in json.loads(Path(file).read_text(encoding="utf-8"))]
    assert completion_of(json.loads(json.dumps(record_of(completions[0])))) == completions[0]
    install_routers(model)
    for number, reply in enumerate(replies):
        row, of, is_last = rows[number - number // 4 - number % 4 // 3], reply["routed_experts"], number % 4 == 3
        used = np.frombuffer(b64decode(of["data"]), of["dtype"]).reshape(of["shape"])
        (mask, routing), start = row.sidecars, 100 * is_last
        assert of["start"] == start and len(used) + start >= 100
        assert np.array_equal(used, routing.completion[start : start + len(used)]), "up to the end of this turn"
        new, masks = reply["token_ids"], [ids.tolist() for ids in mask.lists()[5 * is_last :]]
        assert masks[: len(new)] == reply["sampling_mask"] and all(len(kept) == 7 for kept in masks)
        assert all(token in kept for token, kept in zip(new, masks, strict=False))
    for row in rows:
        with torch.no_grad(), experts_used(plain) as used:
            plain(torch.tensor([row.ids]), use_cache=False)
        assert differing(used, row.sidecars[1].completion) == 0

    def trained(rows, share):
        one = copy.deepcopy(model)
        [micro] = pack(rows, 10_000, torch.device("cpu"), share=share, reading=Reading(replays=True))
        logp_N = LogprobModel(one).train()(*micro.inputs, 1.0)[0]
        logp_N.square().sum().backward()
        return micro.inputs[0].numel(), logp_N, {n: p.grad for n, p in one.named_parameters() if p.grad is not None}

    tokens, logp_N, _ = trained(rows, "on")
    assert tokens < sum(row.tokens for row in rows) - 300
    torch.testing.assert_close(logp_N.sort()[0], torch.tensor([x for c in completions for x in c.logp]).sort()[0])
    others = [
        replace(row, sidecars=(row.sidecars[0], Routing(of.prompt, (of.completion + (k > 2)) % 16)))
        for k, row in enumerate(rows)
        for of in row.sidecars[1:]
    ]
    (fewer, shared_N, shared), (most, apart_N, apart) = (trained(others, share) for share in ("on", "off"))
    assert tokens < fewer < most and not torch.allclose(shared_N.sort()[0], logp_N.sort()[0])
    torch.testing.assert_close(shared_N.sort()[0], apart_N.sort()[0])
    for name, gradient in apart.items():
        torch.testing.assert_close(shared[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.process
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_pictures_are_read_where_they_stand(name, tmp_path, monkeypatch):
    """With positions on three axes, and with pictures that see themselves in both directions. In small pages, histories
    that fork share parts of pictures, which are read whole all the same."""
    monkeypatch.setattr(loop, "PAGE", 4)
    processor, policy = make_seeing(name, tmp_path), PolicyConfig(model=str(tmp_path), dtype="float32")
    album = ImageStore(lambda: processor, image_token(load_config(str(tmp_path))))
    sight = VisionEncoder(load_tower(policy), album.pixels, torch.device("cpu"), 1 << 28)
    shown = tuple(album.read(pictures()[:2], None, "the row", DataConfig()))
    played, model = agents_of("looks", album=album), load_model(policy, ATTENTION)
    asked = {"prompt": "<image> is before <image>.", "pictures": shown}
    completions, _ = sampled(played, model, [asked], reading=Reading(sight))
    assert played[0].shows and [c.episode.total for c in completions] == [1.0, 1.0]
    one, two = shown[0].key, shown[1].key
    for completion in completions:
        assert [picture.key for picture in completion.pictures] == [one, two, one, two, one, two, one]
        assert [keys_of(ids) for _, ids in completion.observations] == [[one], [two], [one, two], [one, two], [one]]
        assert completion_of(json.loads(json.dumps(record_of(completion)))) == completion
        rows, logp = completion.token_rows(0, []), []
        assert {len(rows), len(completion.episode.chats) + 1} == {4}
        for row in rows:
            [micro] = pack([row], 10_000, torch.device("cpu"), share="off", reading=Reading(sight))
            logp += LogprobModel(model)(*micro.inputs, 1.0)[0].tolist()
        assert logp == pytest.approx(completion.logp, abs=2e-5)


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
