"""CUDA graphs without CUDA: a graph that runs its step again, into the same memory."""

from dataclasses import replace

import pytest
import torch
from tiny_models import ARCHITECTURES, VOCABULARY, build, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_grpo.generation import GREEDY, Request, Sampling, generate, stream_key
from hybrid_grpo.generation import loop as loops
from hybrid_grpo.generation.cache import Geometry, PagedCache
from hybrid_grpo.generation.decoder import Decoder
from hybrid_grpo.generation.graphs import Graphs, size_for
from hybrid_grpo.generation.scheduler import Sequence
from hybrid_grpo.model.attention import ATTENTION

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
]


# As on a GPU: the kernels for the CPU are out of reach of whoever captures or watches.
pytestmark = pytest.mark.usefixtures("torch_only")


def model_of(architecture="qwen2"):
    return build(tiny_config(architecture), ATTENTION)


class GraphDecoder(Decoder):
    """Captures its steps as on CUDA: without running them, for the memory that they find when they are replayed."""

    def __init__(self, *args):
        super().__init__(*args, capture=self.capture)
        self.captured = []
        self.replays = 0
        self.results = []

    def capture(self, step):
        state = [self._state_4n, self._table_nw] + ([] if self._seen_nV is None else [self._seen_nV])
        saved = [tensor.clone() for tensor in state]
        # A place to write to that is nobody's: the real one may be past the end of a sequence by now.
        for tensor in state:
            tensor.zero_()
        result = step()
        for tensor, before in zip(state, saved, strict=True):
            tensor.copy_(before)
        self.captured.append(result.shape[1])

        def replay():
            self.replays += 1
            result.copy_(step())

        return replay, result


def through_graphs(monkeypatch, lag, decoders):
    def decoder_for(*args):
        decoder = GraphDecoder(*args)
        decoder.lag = lag
        decoders.append(decoder)
        return decoder

    monkeypatch.setattr(loops, "decoder_for", decoder_for)


def requests_of(lengths, samples=3):
    generator = torch.Generator().manual_seed(0)
    return [
        Request(
            torch.randint(VOCABULARY, (length,), generator=generator).tolist(),
            [stream_key(row, k) for k in range(samples)],
        )
        for row, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("max_slots", [1, 7, 40])
def test_steps_run_as_graphs_give_the_completions_of_steps_run_as_they_are(monkeypatch, lag, sampling, max_slots):
    monkeypatch.setitem(loops.PAGE, "cpu", 4)
    model, requests, decoders = model_of(), requests_of([1, 9, 4, 17, 6]), []
    plain, plain_stats = generate(model, requests, sampling, max_slots=max_slots)
    through_graphs(monkeypatch, lag, decoders)
    groups, stats = generate(model, requests, sampling, max_slots=max_slots)
    for mine, theirs in zip((c for g in groups for c in g), (c for g in plain for c in g), strict=True):
        assert (mine.token_ids, mine.finish) == (theirs.token_ids, theirs.finish)
        assert mine.logp == pytest.approx(theirs.logp, abs=2e-5)
    [decoder] = decoders
    slots = min(max_slots, sum(len(request.keys) for request in requests))
    assert set(decoder.captured) <= {size_for(rows, slots) for rows in range(1, slots + 1)}
    # The first run of a size is not one of its graph, all others are.
    assert decoder.replays + len(decoder.captured) == stats.steps
    assert decoder.replays
    if not lag:
        assert stats.rows == plain_stats.rows


def test_rows_that_fill_up_a_graph_stay_where_there_is_memory(monkeypatch):
    """The longest sequence ends first, and its row is padding for more steps than its table has places."""
    monkeypatch.setitem(loops.PAGE, "cpu", 4)
    model, requests, decoders = model_of(), requests_of([1, 1, 1, 30], samples=1), []
    requests = [replace(request, limits=[n]) for request, n in zip(requests, (30, 30, 30, 2), strict=True)]
    plain, _ = generate(model, requests, Sampling(30))
    through_graphs(monkeypatch, 0, decoders)
    groups, _ = generate(model, requests, Sampling(30))
    assert [[c.token_ids for c in group] for group in groups] == [[c.token_ids for c in group] for group in plain]
    assert set(decoders[0].captured) == {4}


def test_a_step_that_cannot_be_captured_runs_as_it_is_and_says_so_once(monkeypatch):
    def refuse(step):
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might be")

    sampling, requests, model = SAMPLINGS[-1], requests_of([1, 9, 4]), model_of()
    plain, _ = generate(model, requests, sampling)
    monkeypatch.setattr(GraphDecoder, "capture", staticmethod(refuse))
    through_graphs(monkeypatch, 0, [])
    with pytest.warns(UserWarning, match="without CUDA graphs, slower: operation not permitted .* capturing$") as said:
        groups, _ = generate(model, requests, sampling)
    assert len(said) == 1
    assert [[c.token_ids for c in group] for group in groups] == [[c.token_ids for c in group] for group in plain]


def test_a_key_is_run_once_then_replayed_each_into_memory_of_its_own():
    ran = []

    def step_of(key):
        def step():
            ran.append(key)
            return torch.tensor([float(len(ran))])

        return step

    def capture(step):
        result = torch.zeros(1)
        return lambda: result.copy_(step()), result

    graphs = Graphs(capture)
    outcomes = [graphs.run(key, step_of(key)) for key in [(1, 1), (2, 1), (1, 1), (2, 2), (2, 1), (1, 1)]]
    assert ran == [(1, 1), (2, 1), (1, 1), (2, 2), (2, 1), (1, 1)]
    assert outcomes[2] is outcomes[5] and outcomes[2] is not outcomes[4]
    assert [outcome.item() for outcome in outcomes] == [1, 2, 6, 4, 5, 6]


def test_sizes_are_few_and_waste_little():
    assert [size_for(rows, 1000) for rows in (1, 2, 3, 5, 9, 33, 200, 256, 257, 321)] == [
        *(1, 2, 4, 8, 16, 48, 224, 256, 320, 384)
    ]
    assert [size_for(rows, 11) for rows in (1, 7, 9, 11)] == [1, 8, 11, 11]
    sizes = {size_for(rows, 512) for rows in range(1, 513)}
    assert len(sizes) < 20 and all(rows <= size_for(rows, 512) < 2 * rows for rows in range(1, 513))


_WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"}
_SHAPES = {
    *("nonzero", "nonzero_numpy", "argwhere", "masked_select", "unique_dim", "unique_consecutive"),
    *("_unique", "_unique2", "unique_dim_consecutive", "bincount", "repeat_interleave"),
}


class Watch(TorchDispatchMode):
    """Raises where a GPU would have to be waited for, or a shape depends on a value."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen += 1
        if name in _WAITS | _SHAPES:
            raise AssertionError(f"{func} cannot be captured")
        # A number in Python goes along with the launch, a list of them is copied to the device.
        assert name != "lift_fresh" or args[0].dim() == 0, "a tensor is made on the host"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{func} by a mask looks for its places"
        return func(*args, **(kwargs or {}))


def advance(model, sampling, watched):
    """A decode step of 3 sequences and one row of padding."""
    cache = PagedCache(Geometry.of(model), 12, 4, torch.device("cpu"))
    for pool in cache.keys + cache.values:
        pool.normal_()
    decoder = Decoder(model, cache, sampling, slots=4, width=3)
    sequences = [
        Sequence(0, k, k, list(range(1, 5 + k)), 3, 9, [0.0] * (k + 1), cache.take(3), 3 + k) for k in range(3)
    ]
    decoder.insert(0, sequences)
    with watched:
        return decoder._advance(4, 3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_a_step_of_any_architecture_can_be_captured(architecture):
    watch = Watch()
    advance(model_of(architecture), SAMPLINGS[-1], watch)
    assert watch.seen > 50


@pytest.mark.parametrize("sampling", SAMPLINGS)
@torch.no_grad()
def test_a_step_with_any_sampling_can_be_captured(sampling):
    advance(model_of(), sampling, Watch())


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
        lambda x: torch.equal(x, x),
        lambda x: x.__setitem__(x > 0, torch.ones(1)),
    ],
)
@torch.no_grad()
def test_the_watch_sees_what_cannot(step):
    with pytest.raises(AssertionError), Watch():
        step(torch.ones(3))
