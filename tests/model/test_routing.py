"""What the sampler records is what training uses: seen by hooks on the experts themselves."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from experts_used import differing, experts_used
from tiny_models import VOCABULARY, build, tiny_config

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.packing import pack
from hybrid_grpo.generation import Request, Sampling, generate, stream_key
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.reading import Reading
from hybrid_grpo.model.routing import FREE, Replay, Routing, install_routers, joined, recomputed, replays, routed
from hybrid_grpo.model.sidecars import TokenRow, find

CPU = torch.device("cpu")
ROUTERS = {
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4},
    # Groups of experts are chosen first, and a bias ranks experts without weighting them.
    "deepseek_v3": {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
PROMPTS = [[(7 * row + 3 * place) % VOCABULARY for place in range(5 + 4 * row)] for row in range(4)]


def model_of(architecture):
    return build(tiny_config(architecture, **ROUTERS[architecture]), ATTENTION)


def sampled(view):
    """Rows of three completions of every prompt, group after group."""
    requests = [Request(prompt, [stream_key(0, 1, row, k) for k in range(3)]) for row, prompt in enumerate(PROMPTS)]
    groups, _ = generate(view, requests, Sampling(20, temperature=1.0), max_slots=5, prefill_tokens=11)
    return [(prompt, completion) for prompt, group in zip(PROMPTS, groups, strict=True) for completion in group]


def token_rows(rows, routing):
    every = TokenRow.of([prompt for prompt, _ in rows], [completion.token_ids for _, completion in rows])
    return [replace(row, sidecars=(each,) if each else ()) for row, each in zip(every, routing, strict=True)]


def packed(rows, routing, replayed):
    [micro] = pack(token_rows(rows, routing), 10_000, CPU, share="on", reading=Reading(replays=replayed))
    order = [(rows[r][0], routing[r], len(rows[r][1].token_ids) - 1, k) for k, r in enumerate(micro.rows)]
    parts = []
    for prompt, of_row, length, k in order:
        parts += [(of_row.prompt, len(prompt))] if k == 0 or order[k - 1][0] is not prompt else []
        parts.append((of_row.completion, length))
    return micro, joined(parts)


def rolled(routing, experts):
    """Other experts than were recorded; a group keeps one array for its prompt."""
    return Routing((routing.prompt + 1) % experts, (routing.completion + 1) % experts)


@pytest.mark.parametrize("architecture", ROUTERS)
def test_training_uses_the_recorded_experts_and_the_gap_shrinks(architecture):
    """The sampler has float32 weights here and training bfloat16 ones, so that routers differ more than by rounding."""
    model = model_of(architecture)
    rows = sampled(copy.deepcopy(model))
    routing = [completion.sidecars[0] for _, completion in rows]
    assert all(r.prompt is routing[k - k % 3].prompt for k, r in enumerate(routing)), "a group's prompt has one array"
    model = model.to(torch.bfloat16)
    install_routers(model)
    scored, shares, gaps = LogprobModel(model), {}, {}
    for replayed in (False, True):
        micro, recorded = packed(rows, routing, replayed)
        with torch.no_grad(), experts_used(model) as used:
            logp_N, _ = scored(*micro.inputs, 1.0)
        shares[replayed] = differing(used, recorded)
        expected_N = torch.cat([torch.tensor(rows[row][1].logp) for row in micro.rows])
        gaps[replayed] = float((logp_N - expected_N).abs().mean())
        numbers = {name: float(value) for name, (value, _) in find(micro.sidecars, Replay).numbers().items()}
        assert numbers["moe/differs_frac"] == pytest.approx(shares[replayed])
        assert numbers["moe/would_differ_frac"] >= shares[replayed] and numbers["moe/load_max"] > 1
    assert shares[False] > 0.01 and shares[True] == 0
    assert gaps[True] < gaps[False]


@pytest.mark.parametrize("architecture", ROUTERS)
def test_gradients_are_those_of_free_routers_where_these_agree_and_go_through_the_recorded_experts(architecture):
    model = model_of(architecture)
    rows = sampled(copy.deepcopy(model))
    routing = [completion.sidecars[0] for _, completion in rows]
    others = [rolled(each, 16 if architecture != "gpt_oss" else 8) for each in routing]
    install_routers(model)

    def gradients(given, replayed, checkpointing=False):
        one = copy.deepcopy(model)
        if checkpointing:
            one.activation_checkpointing_enable({"use_reentrant": False, "context_fn": partial(recomputed, True)})
        micro, recorded = packed(rows, given, replayed)
        with experts_used(one) as used:
            logp_N, entropy_N = LogprobModel(one).train()(*micro.inputs, 1.0)
            loss = logp_N.sum() + entropy_N.square().sum()
            loss.backward()
        layers = recorded.shape[1]
        assert len(used) == layers * (2 if checkpointing else 1)
        if replayed:
            assert differing(used[:layers], recorded) == 0
            assert not checkpointing or differing(used[: -layers - 1 : -1], recorded) == 0
        return {name: p.grad for name, p in one.named_parameters() if p.grad is not None}

    free, replayed = gradients(routing, False), gradients(routing, True)
    assert free.keys() == replayed.keys() and any("router" in n or "gate.weight" in n for n in free)
    for name, gradient in free.items():
        torch.testing.assert_close(replayed[name], gradient, rtol=1e-6, atol=1e-7)
    # Recomputed layers go through the recorded experts too, or their gradients would be those of others.
    elsewhere, again = gradients(others, True), gradients(others, True, checkpointing=True)
    for name, gradient in elsewhere.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-6, atol=1e-7)
    assert any(not torch.allclose(elsewhere[name], free[name], rtol=0.1) for name in elsewhere.keys() & free.keys())


def test_tokens_without_a_recording_and_forwards_within_routed_none_are_free():
    model = model_of("qwen3_moe")
    rows = sampled(copy.deepcopy(model))
    install_routers(model)
    (own,) = rows[0][1].sidecars
    routing = [rolled(own, 16), None, None]
    given = token_rows(rows[:3], routing)
    [micro] = pack(given, 10_000, CPU, share="off", reading=Reading(replays=True))
    lengths = [given[row].tokens for row in micro.rows]
    begin = sum(lengths[: micro.rows.index(0)])
    recorded = slice(begin, begin + lengths[micro.rows.index(0)])

    def differs(of_row):
        with torch.no_grad(), experts_used(model) as used:
            LogprobModel(model)(*micro.inputs, 1.0)
        return differing([layer[recorded] for layer in used], np.concatenate([of_row.prompt, of_row.completion]))

    assert differs(routing[0]) == 0 and differs(own) == 1
    assert int(find(micro.sidecars, Replay).numbers()["moe/differs_frac"][1]) == recorded.stop - recorded.start
    with routed(None):
        assert differs(routing[0]) == 1 and differs(own) == 0


def test_the_setting_and_the_model_decide():
    experts, dense = model_of("qwen3_moe"), build(tiny_config("qwen3"), ATTENTION)
    half, full = PolicyConfig(dtype="bfloat16"), PolicyConfig(dtype="float32")
    assert replays(experts, half, paged=True) is True and replays(experts, full, paged=True) is False
    assert replays(experts, PolicyConfig(routing="replay", dtype="float32"), paged=True) is True
    assert replays(experts, PolicyConfig(routing="free"), paged=True) is False
    assert replays(experts, half, paged=False) is replays(dense, half, paged=True) is None
    for model, paged in ((dense, True), (experts, False)):
        with pytest.raises(UserError, match=f"policy.routing replay: {type(model).__name__} .* to auto"):
            replays(model, PolicyConfig(routing="replay"), paged=paged)


def test_unknown_tokens_of_a_part_are_free():
    known = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
    assert joined([(None, 3), (known[:0], 2)]) is None
    every = joined([(None, 1), (known, 3), (known, 1)])
    assert every[0].max() == every[3].max() == FREE
    assert (every[1:3] == known).all() and (every[4] == known[0]).all()
