"""CUDA graphs without CUDA: by a double that records a step and replays it at the addresses of its capture."""

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import cuda_graphs
import gpu_attention
import pytest
import torch
from cuda_graphs import CaptureRefused, Captures
from decoders import assert_alike, generate
from tiny_models import ARCHITECTURES, VOCABULARY, build, tiny_config

from hybrid_grpo.config import RolloutConfig
from hybrid_grpo.generation import GREEDY, Request, Sampling, Workspace, stream_key
from hybrid_grpo.generation import fused_step as fusing
from hybrid_grpo.generation import loop as loops
from hybrid_grpo.generation.cache import PagedCache
from hybrid_grpo.generation.decoder import Decoder, capture_on
from hybrid_grpo.generation.graphs import GRAPH_BYTES, Graphs, bytes_of, size_for, sizes_up_to
from hybrid_grpo.generation.sequence import Sequence
from hybrid_grpo.generation.shape_probe import geometry_of
from hybrid_grpo.generation.workspace import workspace_beside
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.kernels import gpu
from hybrid_grpo.model.kernels.gpu import launcher

STOPS = tuple(range(0, VOCABULARY, 7))
EVERYTHING = {
    **{"min_tokens": 2, "stop_ids": STOPS, "repetition_penalty": 1.3, "logit_bias": ((3, 2.0), (5, -1.0))},
    **{"logprobs": "sampling"},
}
SAMPLINGS = [
    Sampling(20, stop_ids=STOPS),
    Sampling(20, temperature=GREEDY),
    Sampling(20, temperature=GREEDY, **EVERYTHING),
    Sampling(20, temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, **EVERYTHING),
    Sampling(20, top_p=0.9, logprobs="mask"),
]


# As on a GPU: the kernels for the CPU are out of reach of whoever captures or watches.
pytestmark = pytest.mark.usefixtures("torch_only")


def model_of(architecture="qwen2"):
    return build(tiny_config(architecture), ATTENTION)


@pytest.fixture
def captures(monkeypatch):
    """Steps are captured, by the double."""
    double = Captures()
    monkeypatch.setattr(loops, "capture_on", lambda _: double)
    return double


def plainly(*args, **kwargs):
    """`generate`, nothing captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "capture_on", lambda _: None)
        return generate(*args, **kwargs)


def requests_of(lengths, samples=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        Request(
            torch.randint(VOCABULARY, (length,), generator=generator).tolist(),
            [stream_key(seed, row, k) for k in range(samples)],
        )
        for row, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("max_slots", [1, 7, 40])
def test_steps_run_as_graphs_give_the_completions_of_steps_run_as_they_are(
    monkeypatch, captures, lag, sampling, max_slots
):
    class Lagging(Decoder):
        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            assert self.max_in_flight == 2
            self.max_in_flight = lag

    monkeypatch.setattr(loops, "PAGE", 4)
    model, requests = model_of(), requests_of([1, 9, 4, 17, 6], samples=1 if max_slots == 1 else 3)
    plain, plain_stats = plainly(model, requests, sampling, max_slots=max_slots)
    monkeypatch.setattr(loops, "Decoder", Lagging)
    groups, stats = generate(model, requests, sampling, max_slots=max_slots)
    assert_alike(groups, plain)
    slots = min(max_slots, sum(len(request.keys) for request in requests))
    assert set(captures.forwards) <= {size_for(rows, slots) for rows in range(1, slots + 1)}
    # A step is a forward and a choice. The first run of a size is not one of its graph, all others are.
    assert captures.replays + len(captures.graphs) == 2 * stats.steps
    assert captures.replays and stats.captures == len(captures.forwards) == len(captures.graphs) / 2
    if not lag:
        assert stats.rows == plain_stats.rows


def as_in_half_precision(monkeypatch):
    """Attention by doubles of the kernels for GPUs, each one operation of a graph."""
    gpu_attention.install(monkeypatch, flash=False)
    captured = cuda_graphs.kernel(gpu_attention.paged_attention, writes=True)
    monkeypatch.setattr(gpu.attention, "paged_attention", captured)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_twelve_rollouts_capture_in_the_first_alone(monkeypatch, captures, dtype):
    """Random prompts, evaluations between, new weights after each: that a replay finds all its memory where it was at
    its capture is checked by the double."""
    model, rng = model_of().to(dtype), random.Random(0)
    low, high, limit, slots = 1, 60, 10, 9
    if dtype == torch.bfloat16:
        as_in_half_precision(monkeypatch)
        low, high = 225, 285
    else:
        monkeypatch.setattr(loops, "PAGE", 16)
    workspace = Workspace(slots, high + limit)
    kinds = [replace(sampling, max_tokens=limit) for sampling in SAMPLINGS]
    seen = []
    for rollout in range(12):
        sampling = kinds[0] if rollout % 3 else kinds[rollout // 3 % len(kinds)]
        lengths = [rng.randint(low, high) for _ in range(rng.randint(1, 5))]
        requests = requests_of(lengths, samples=rng.randint(1, 4), seed=rollout)
        groups, stats = generate(model, requests, sampling, max_slots=slots, workspace=workspace)
        plain, _ = plainly(model, requests, sampling, max_slots=slots)
        assert_alike(groups, plain, gap=2e-5 if dtype == torch.float32 else 1e-6)
        seen.append(stats.captures)
        for parameter in model.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rollout)))
    sizes = [9, 8, 4, 2, 1]
    # What the plan and the room beside the cache count.
    assert bytes_of(slots) - bytes_of(1) == (len(sizes) - 1) * GRAPH_BYTES
    assert seen == [len(sizes)] + [0] * 11
    assert captures.forwards == sizes, "the largest first, one for sequences of all lengths and any sampling"
    assert captures.replays > 240


@torch.no_grad()
def test_evaluations_and_models_beside_the_policy_capture_once_in_twelve_rollouts(monkeypatch, captures):
    """Each model beside the policy had no memory of its own, and captured all its graphs in every call. The double
    checks that no replay finds its memory elsewhere."""
    config, rng = (RolloutConfig(num_generations=2, max_slots=9), random.Random(0))
    policy, guest = (build(tiny_config("qwen2", layers=1), ATTENTION) for _ in range(2))
    kept, memory = Workspace(9, 60), 1 << 20
    for_guest, bytes_ = workspace_beside(config, guest.config, "float32", 6, 40, memory)
    assert (for_guest.slots, for_guest.tokens) == (6, 40)
    assert bytes_ - bytes_of(6) - 6 * VOCABULARY * 4 < 0.1 * memory
    seen: dict[str, list[int]] = {"policy": [], "evaluation": [], "guest": []}

    def generated(who, model, workspace, most, sampling):
        lengths = [rng.randint(1, most - sampling.max_tokens) for _ in range(rng.randint(1, 4))]
        requests = requests_of(lengths, samples=rng.randint(1, 3), seed=len(seen[who]))
        _, stats = generate(model, requests, sampling, max_slots=9, workspace=workspace)
        seen[who].append(stats.captures)

    for rollout in range(12):
        generated("guest", guest, for_guest, 40, Sampling(6))
        generated("policy", policy, kept, 60, SAMPLINGS[rollout % 2])
        if rollout % 5 == 0:
            generated("evaluation", policy, kept, 60, Sampling(20, temperature=GREEDY))
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    assert all(first and not any(rest) for first, *rest in (seen["policy"], seen["guest"])), seen
    assert len(seen["evaluation"]) == 3 and not any(seen["evaluation"])


@torch.no_grad()
def test_the_fused_step_of_a_gpu_is_captured_too(monkeypatch, captures):
    """Its Triton kernels are interpreted, which is slow: one layer, two rollouts of a few steps, tokens by torch."""
    as_in_half_precision(monkeypatch)
    monkeypatch.setattr(launcher, "on_gpu", lambda _: True)
    # Whether it computes what the model does is another test's question.
    monkeypatch.setattr(fusing, "_agrees", lambda *_: True)
    monkeypatch.setattr(gpu, "proven", lambda what, *_, **__: what in ("attention", "decoding"))
    launch = cuda_graphs.kernel(launcher.launch, writes=True)
    for module in (gpu.gate, gpu.norm, gpu.products, gpu.rotation):
        monkeypatch.setattr(module, "launch", launch)
    model = build(tiny_config("qwen2", layers=1), ATTENTION).to(torch.bfloat16)
    workspace, seen = Workspace(2, 20), []
    for rollout in range(2):
        requests = requests_of([9], samples=2, seed=rollout)
        groups, stats = generate(model, requests, Sampling(3), workspace=workspace)
        assert_alike(groups, plainly(model, requests, Sampling(3))[0], gap=1e-6)
        seen.append(stats.captures)
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert seen == [2, 0] and captures.replays == 12
    operations = captures.graphs[0].operations
    assert launcher.launch in [function for function, *_ in operations]
    assert [function for function, *_, filled in operations if filled] == [], "a captured forward takes no memory"


@torch.no_grad()
def test_whether_the_fused_step_is_right_is_found_out_before_the_cache_takes_its_memory(monkeypatch, captures):
    """Afterwards there may be too little for the check, and decoding was not fused for the whole run."""
    calls, cache_for = [], loops.cache_for
    monkeypatch.setattr(loops, "cache_for", lambda *given, **named: calls.append("cache") or cache_for(*given, **named))
    monkeypatch.setattr(fusing, "usable", lambda *_, **__: True)
    monkeypatch.setattr(fusing, "_looks_right", lambda _, like, __: calls.append(f"check with {like.pages}") or False)
    generate(model_of("llama"), requests_of([30] * 9), Sampling(20))
    assert calls[:2] == ["check with 2", "cache"]


@torch.no_grad()
def test_only_a_longer_sequence_and_weights_that_moved_are_captured_again(captures):
    model, sampling, workspace = model_of(), Sampling(5), Workspace(4, 20)

    def check(lengths):
        requests = requests_of(lengths)
        groups, stats = generate(model, requests, sampling, workspace=workspace)
        assert_alike(groups, plainly(model, requests, sampling)[0])
        return stats.captures

    assert [check([15]), check([3, 7])] == [3, 0]
    assert [check([35]), check([2, 15])] == [3, 0]
    assert (workspace.slots, workspace.tokens) == (4, 40)
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1
    assert [check([4]), check([30])] == [3, 0]


@torch.no_grad()
def test_a_call_that_fails_leaves_nothing_behind_in_the_workspace(captures):
    """Neither pages that it held, nor what weights that are not finite have left in them."""
    model, requests, sampling = model_of(), requests_of([9, 30, 4]), Sampling(8)
    workspace, embedding = Workspace(4, 40), model.get_input_embeddings().weight
    plain, _ = plainly(model, requests, sampling)
    sound = embedding.clone()
    embedding.fill_(torch.nan)

    def fail(*_):
        raise KeyError("a reward")

    with pytest.raises(KeyError, match="a reward"):
        generate(model, requests, sampling, workspace=workspace, on_finish=fail)
    embedding.copy_(sound)
    groups, stats = generate(model, requests, sampling, workspace=workspace)
    assert_alike(groups, plain)
    assert stats.captures == 0 and len(captures.graphs) == 2 * 3


def test_rows_that_fill_up_a_graph_stay_where_there_is_memory(monkeypatch, captures):
    """The longest sequence ends first, and its row is padding for more steps than its table has places."""
    monkeypatch.setattr(loops, "PAGE", 4)
    model, requests = model_of(), requests_of([1, 1, 1, 30], samples=1)
    requests = [replace(request, limits=[n]) for request, n in zip(requests, (30, 30, 30, 2), strict=True)]
    plain, _ = plainly(model, requests, Sampling(30))
    groups, _ = generate(model, requests, Sampling(30))
    assert_alike(groups, plain)
    assert set(captures.forwards) == {4}


def test_every_decoder_has_a_pool_of_its_own(monkeypatch):
    """A pool whose graphs are gone cannot always be opened again: vLLM issue 53682."""
    handles = iter(range(9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    pools = [capture_on(torch.device("cuda")).keywords["pool"] for _ in range(2)]
    assert pools == [0, 1]
    assert capture_on(torch.device("cpu")) is None


class Flaky:
    """Captures, of which the first fails."""

    def __init__(self):
        self.works, self.fails = Captures(), 1

    def __call__(self, step):
        self.fails -= 1
        if self.fails >= 0:
            raise RuntimeError("CUDA out of memory\nTried to")
        return self.works(step)


def test_a_capture_that_failed_is_tried_again_at_the_next_rollout(monkeypatch):
    model, requests, workspace, flaky = model_of(), requests_of([1, 9, 4]), Workspace(9, 30), Flaky()
    monkeypatch.setattr(loops, "capture_on", lambda _: flaky)
    with pytest.warns(UserWarning, match="slower without CUDA graphs: CUDA out of memory$"):
        counts = [generate(model, requests, Sampling(5), workspace=workspace)[1].captures for _ in range(3)]
    assert counts == [0, 5, 0]


def test_steps_are_not_captured_without_room(monkeypatch):
    model, requests = model_of(), requests_of([1, 9, 4])

    def no_room(step):
        raise RuntimeError("3 MiB are free")

    monkeypatch.setattr(loops, "capture_on", lambda _: no_room)
    with pytest.warns(UserWarning, match="slower without CUDA graphs: 3 MiB are free$"):
        generate(model, requests, Sampling(5))


@pytest.mark.parametrize("workspace", [None, Workspace(9, 64)])
def test_a_step_that_cannot_be_captured_runs_as_it_is_and_says_so_once(monkeypatch, workspace):
    def refuse(step):
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might be")

    sampling, requests, model = SAMPLINGS[-1], requests_of([1, 9, 4]), model_of()
    plain, _ = plainly(model, requests, sampling)
    monkeypatch.setattr(loops, "capture_on", lambda _: refuse)
    with pytest.warns(UserWarning, match="slower without CUDA graphs: operation not permitted .* capturing$") as said:
        groups, stats = generate(model, requests, sampling, workspace=workspace)
    assert len(said) == 1 and stats.captures == 0
    assert_alike(groups, plain)


def test_a_key_is_run_once_then_replayed_each_into_memory_of_its_own():
    ran = []

    def step_of(key):
        def step():
            ran.append(key)
            return (torch.tensor([float(len(ran))]),)

        return step

    def capture(step):
        result = torch.zeros(1)
        return lambda: result.copy_(step()[0]), (result,)

    runs = Graphs(capture)
    outcomes = [runs.run(rows, step_of(rows))[0] for rows in [1, 2, 1, 3, 2, 1]]
    assert ran == [1, 2, 1, 3, 2, 1]
    assert outcomes[2] is outcomes[5] and outcomes[2] is not outcomes[4]
    assert [outcome.item() for outcome in outcomes] == [1, 2, 6, 4, 5, 6]


def test_sizes_are_few_and_waste_little():
    assert [size_for(rows, 1000) for rows in (1, 2, 3, 5, 9, 33, 200, 256, 257, 321)] == [
        *(1, 2, 4, 8, 16, 48, 224, 256, 320, 384)
    ]
    assert [size_for(rows, 11) for rows in (1, 7, 9, 11)] == [1, 8, 11, 11]
    sizes = {size_for(rows, 512) for rows in range(1, 513)}
    assert sizes_up_to(512) == sorted(sizes, reverse=True)
    assert len(sizes) < 20 and all(rows <= size_for(rows, 512) < 2 * rows for rows in range(1, 513))


def decoder_of(model, sampling, capture=None):
    """A decoder of 3 sequences and room for one more."""
    cache = PagedCache(geometry_of(model), 12, 4, torch.device("cpu"), 4, 8)
    for index, pool in enumerate(cache.keys + cache.values):
        pool.normal_(generator=torch.Generator().manual_seed(index))
    decoder = Decoder(model, cache, sampling, 4, 3, capture)
    sequences = [
        Sequence(0, k, k, list(range(1, 5 + k)), 3, 9, [0.0] * (k + 1), cache.allocate(3), 3 + k) for k in range(3)
    ]
    for sequence in sequences:
        sequence.state = cache.states.allocate()
    decoder.insert(0, sequences)
    return decoder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_a_step_of_any_architecture_can_be_captured(architecture):
    model, captures = model_of(architecture), Captures()
    decoder = decoder_of(model, SAMPLINGS[0], captures)
    forward = partial(decoder._forward_to_logits, 4)
    decoder._graphs.run(4, forward)
    decoder.cache.states.zero(list(range(decoder.slots)))  # where there are any, each forward changes them
    for recorded in decoder.cache._experts:
        recorded.zero_()
    logits_nV, plain = decoder._graphs.run(4, forward)[0][:3], decoder_of(model, SAMPLINGS[0])
    assert captures.replays == 1 and len(captures.graphs[0].operations) > 50
    torch.testing.assert_close(logits_nV, plain._forward(3, 3), rtol=1e-4, atol=1e-5)
    for recorded, expected in zip(decoder.cache._experts, plain.cache._experts, strict=True):
        assert expected.any() and torch.equal(recorded[1:], expected[1:])  # rows that pad the graph write to page 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
@torch.inference_mode()
def test_a_step_with_any_sampling_waits_for_nothing(sampling):
    decoder, captures = decoder_of(model_of(), sampling), Captures()
    captures(lambda: decoder._choose(decoder._forward(4, 3), 4))
    assert len(captures.graphs[0].operations) > 50


@torch.no_grad()
@pytest.mark.parametrize("step", [
    lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: x.cpu(), lambda x: bool((x > 0).any()),
    lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.unique(), lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    lambda x: torch.equal(x, x), lambda x: x.__setitem__(x > 0, torch.ones(1)),
])  # fmt: skip
def test_the_double_refuses_what_a_capture_refuses(step):
    x = torch.ones(3)
    with pytest.raises(CaptureRefused, match="operation not permitted when stream is capturing: "):
        Captures()(lambda: (step(x),))


@torch.no_grad()
def test_the_double_runs_nothing_at_capture_and_no_python_at_replay():
    x, written, python = torch.arange(3.0), torch.zeros(3), SimpleNamespace(number=2)

    def step():
        written.add_(x)
        return (x * python.number,)

    replay, (result,) = Captures()(step)
    assert written.tolist() == [0, 0, 0] and result.isnan().all()
    python.number = 5
    x += 1
    replay()
    assert written.tolist() == [1, 2, 3] and result.tolist() == [2, 4, 6]
