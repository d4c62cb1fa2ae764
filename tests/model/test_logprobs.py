import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from paths import SUPPORT
from tiny_models import ARCHITECTURES, TIED, VOCABULARY, build, tiny_config

from hybrid_grpo.data.packing import pack
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.logprobs import LogitShape, LogprobModel, squared_probabilities, token_logprobs
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.model.support import MaskColumns, SamplingMask
from hybrid_grpo.model.upload import Selection


def plain(hidden, weight, bias, target, shape=LogitShape(), temperature=1.0, kept_NV=None):  # noqa: B008
    """The definition, with all logits at once and gradients by autograd."""
    x = torch.nn.functional.linear(hidden, weight, bias) * shape.scale
    if shape.softcap is not None:
        x = torch.tanh(x / shape.softcap) * shape.softcap
    x = x[:, : shape.vocabulary]
    x = x if kept_NV is None else x.masked_fill(~kept_NV, -torch.inf)
    logp_NV = (x / temperature).log_softmax(-1)
    logp = logp_NV.gather(1, target[:, None])[:, 0]
    return logp, -(logp_NV.exp() * logp_NV.clamp(min=-1e9)).sum(-1)


def head(tokens=37, hidden=16, vocabulary=53, bias=True, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    target = torch.randint(4 * vocabulary // 5, (tokens,), generator=generator)
    return randn(tokens, hidden), randn(vocabulary, hidden), randn(vocabulary) if bias else None, target


def leaves(hidden, weight, bias, target):
    return [leaf for leaf in (hidden, weight, bias) if leaf is not None]


def relative(mine, theirs):
    """Largest difference over the largest value."""
    return ((mine.double() - theirs.double()).abs().max() / theirs.double().abs().max()).item()


def weighted(outputs, use):
    """A scalar with a weight of its own for every token."""
    total = 0.0
    for name, values in zip(("logp", "entropy"), outputs, strict=True):
        if name in use:
            generator = torch.Generator().manual_seed(len(name))
            total = total + (values * torch.randn(len(values), generator=generator).to(values.dtype)).sum()
    return total


SHAPES = [LogitShape(), LogitShape(scale=0.3), LogitShape(softcap=4.0), LogitShape(scale=1.7, softcap=2.5)]


@pytest.mark.parametrize("use", [("logp",), ("entropy",), ("logp", "entropy")], ids="+".join)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.8])
@pytest.mark.parametrize("shape", [*SHAPES, LogitShape(softcap=4.0, vocabulary=43)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_the_definition(shape, temperature, bias, use, by):
    inputs = head(bias=bias)
    expected = plain(*inputs, shape=shape, temperature=temperature)
    gradients = torch.autograd.grad(weighted(expected, use), leaves(*inputs))
    # Tiles of 1 token, of some that do not divide 37, of exactly all, of more; and of the vocabulary's 53 likewise.
    for rows, columns in ((1, 53), (5, 7), (36, 52), (37, 1), (1000, 1000)):
        tile = {"tile_bytes": rows * 4 * min(columns, 53), "tile_columns": columns}
        mine = token_logprobs(*inputs, shape=shape, temperature=temperature, **tile)
        for values, theirs in zip(mine, expected, strict=True):
            assert relative(values, theirs) < 1e-5
        for gradient, theirs in zip(torch.autograd.grad(weighted(mine, use), leaves(*inputs)), gradients, strict=True):
            assert relative(gradient, theirs) < 1e-5


@pytest.mark.parametrize("use", [("logp",), ("logp", "entropy")], ids="+".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_over_a_support_they_are_those_of_the_masked_softmax(shape, bias, use, by):
    """In float64, with supports of one token, of few, of many and of all, and a head that keeps tokens out of all of
    them."""
    inputs = head(tokens=60, vocabulary=300, bias=bias)
    exact = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in inputs[:3]]
    generator = torch.Generator().manual_seed(1)
    share_N1 = torch.tensor([0.0, 0.01, 0.1, 0.9, 1.0]).repeat(12)[:, None]
    for never in (40, 0):
        kept_NV = torch.rand(60, 300, generator=generator) < share_N1
        kept_NV[:, 10 : 10 + never] = False
        kept_NV.scatter_(1, inputs[3][:, None], True)
        expected = plain(*exact, inputs[3], shape, 0.6, kept_NV)
        gradients = torch.autograd.grad(weighted(expected, use), leaves(*exact, None))
        support = SamplingMask.of([row.nonzero()[0] for row in kept_NV.numpy()])
        columns = MaskColumns(support, inputs[3].numpy(), torch.device("cpu"))
        for rows, width in ((60, 300), (7, 11)):
            tile = {"tile_bytes": rows * 4 * width, "tile_columns": width}
            mine = token_logprobs(*inputs, support=columns, shape=shape, temperature=0.6, **tile)
            for values, theirs in zip(mine, expected, strict=True):
                assert relative(values, theirs) < 1e-6
            for found, theirs in zip(torch.autograd.grad(weighted(mine, use), leaves(*inputs)), gradients, strict=True):
                assert relative(found, theirs) < 1e-5


def test_a_weight_that_is_frozen_gets_no_gradient_and_the_rest_does():
    hidden, weight, bias, target = head()
    weight, bias = weight.detach(), bias.detach()
    logp, _ = token_logprobs(hidden, weight, bias, target)
    logp.sum().backward()
    assert weight.grad is None
    [expected] = torch.autograd.grad(plain(hidden, weight, bias, target)[0].sum(), [hidden])
    assert relative(hidden.grad, expected) < 1e-5


def test_bfloat16_weights_lose_no_contribution_to_rounding():
    """4,000 tokens that push the weight the same way, a token a chunk: a bfloat16 sum would stop at 256 of them."""
    tokens, vocabulary = 4000, 11
    hidden = torch.ones(tokens, 4, dtype=torch.bfloat16)
    weight = torch.zeros(vocabulary, 4, dtype=torch.bfloat16).requires_grad_()
    bias = torch.zeros(vocabulary, dtype=torch.bfloat16).requires_grad_()
    target = torch.full((tokens,), 3)
    logp, _ = token_logprobs(hidden, weight, bias, target, tile_bytes=4 * vocabulary)
    logp.sum().backward()
    expected = torch.full((vocabulary,), -tokens / vocabulary)
    expected[3] += tokens
    # Two roundings to bfloat16, of dx and of the sum.
    assert torch.allclose(weight.grad[:, 0].float(), expected, rtol=2**-7)
    assert torch.allclose(bias.grad.float(), expected, rtol=2**-7)


@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(scale=0.7, softcap=6.0)], ids=str)
def test_bfloat16_gradients_are_near_those_of_float32(shape):
    half = head(tokens=300, vocabulary=200, dtype=torch.bfloat16, bias=False)
    full = [half[0].detach().float().requires_grad_(), half[1].detach().float().requires_grad_(), None, half[3]]
    mine, exact = token_logprobs(*half, shape=shape, tile_bytes=7 * 200, tile_columns=50), plain(*full, shape=shape)
    assert all(values.dtype == torch.float32 for values in mine)
    gradients = torch.autograd.grad(weighted(mine, ("logp", "entropy")), half[:2])
    expected = torch.autograd.grad(weighted(exact, ("logp", "entropy")), full[:2])
    for gradient, theirs in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert relative(gradient, theirs) < 0.02
        # No bias: what is lost or gained is rounding.
        assert abs((gradient.double() - theirs).mean()) < 1e-3 * theirs.abs().max()


def test_no_tokens_are_no_values_and_a_gradient_of_zero():
    hidden, weight, bias, target = head(tokens=0)
    logp, entropy = token_logprobs(hidden, weight, bias, target)
    (logp.sum() + entropy.sum()).backward()
    assert len(logp) == len(entropy) == 0
    assert not weight.grad.any() and not bias.grad.any()


@pytest.mark.parametrize("config, expected", [
    ({}, LogitShape(1.0, None)),
    ({"logit_scale": 0.0625}, LogitShape(0.0625, None)),
    ({"logits_scaling": 8.0}, LogitShape(0.125, None)),
    ({"final_logit_softcapping": 30.0}, LogitShape(1.0, 30.0)),
    ({"logit_scale": None, "final_logit_softcapping": None}, LogitShape(1.0, None)),
])  # fmt: skip
def test_scales_and_soft_caps_are_read_from_the_model_s_configuration(config, expected):
    assert LogitShape.of(SimpleNamespace(**config)) == expected


def micro_batch():
    """Rows of different lengths: token ids, right-padded, and the tokens to score."""
    generator = torch.Generator().manual_seed(3)
    lengths = [(3, 9), (1, 1), (8, 4), (5, 7), (1, 11)]
    ids = torch.randint(VOCABULARY, (len(lengths), 12), generator=generator)
    mask = torch.zeros(len(lengths), 12, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(lengths):
        mask[row, prompt : prompt + completion] = True
    return ids, mask, lengths


def scores_of(model, ids, mask, temperature):
    """Scores of the tokens under the mask by `LogprobModel`, row after row."""
    before = mask.flatten().nonzero()[:, 0].numpy() - 1
    source = Selection(before, ids.device)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return LogprobModel(model)(ids, positions, source, ids[mask], None, (), temperature)


def plain_scores(model, ids, mask, lengths, temperature):
    """Scores by the model's own forward, row by row, without padding."""
    logp, entropy = [], []
    for row, (prompt, completion) in enumerate(lengths):
        sequence = ids[row : row + 1, : prompt + completion]
        logp_TV = (model(sequence, use_cache=False).logits[0, prompt - 1 : -1] / temperature).log_softmax(-1)
        logp.append(logp_TV.gather(1, sequence[0, prompt:, None])[:, 0])
        entropy.append(-(logp_TV.exp() * logp_TV).sum(-1))
    return torch.cat(logp), torch.cat(entropy)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [(name, {}) for name in ARCHITECTURES]
    + [(name, {"tie_word_embeddings": True}) for name in ("qwen2", "llama")]
    + [("falcon_h1", {"lm_head_multiplier": 0.3})],
)
def test_a_model_s_scores_and_gradients_are_those_of_its_own_forward(architecture, changes):
    config = tiny_config(architecture, **changes)
    own, scored = build(config), build(config)
    ids, mask, lengths = micro_batch()
    expected = plain_scores(own, ids, mask, lengths, 0.7)
    weighted(expected, ("logp", "entropy")).backward()

    mine = scores_of(scored, ids, mask, 0.7)
    assert mine[0].shape == mine[1].shape == (int(mask.sum()),)
    for values, theirs in zip(mine, expected, strict=True):
        assert relative(values, theirs) < 1e-5
    weighted(mine, ("logp", "entropy")).backward()

    tied = own.get_input_embeddings().weight is own.get_output_embeddings().weight
    assert tied == (architecture in TIED or "tie_word_embeddings" in changes)
    theirs = dict(own.named_parameters())
    largest = max(parameter.grad.abs().max() for parameter in theirs.values())
    for name, parameter in scored.named_parameters():
        # Key biases have a gradient of zero but for rounding: differences count against the largest gradient.
        assert (parameter.grad - theirs[name].grad).abs().max() < 1e-5 * largest, name


def test_equal_targets_of_rows_that_begin_alike_are_computed_once():
    """Siblings that part late, one of them twice: values and gradients are those of every target by itself."""
    rows = [[5, 6, 7, 8, 9, 1, 2, 3, 4, *end] for end in ([1, 2], [1, 3], [1, 2], [8])]
    [micro] = pack(TokenRow.of([[3, 4, 5]] * 4, rows), 1000, torch.device("cpu"), share="on")
    model, sizes = LogprobModel(build(tiny_config("qwen2"), ATTENTION)), []
    model.model.lm_head.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    found = []
    for sidecars in (micro.sidecars, ()):
        model.zero_grad()
        logp_N, entropy_N, square_N = model(*replace(micro, sidecars=sidecars).inputs, 0.7, squared_probabilities)
        (logp_N * torch.arange(len(logp_N)) + entropy_N.square()).sum().backward()
        grads = [p.grad.flatten() for p in model.parameters()]
        found.append(torch.cat([logp_N.detach(), entropy_N.detach(), square_N.detach(), *grads]))
    assert sizes == [14, 43] and relative(*found) < 1e-6


def test_padding_has_no_part_in_scores_and_gradients():
    ids, mask, lengths = micro_batch()
    other = ids.clone()
    for row, (prompt, completion) in enumerate(lengths):
        other[row, prompt + completion :] = (other[row, prompt + completion :] + 1) % VOCABULARY
    assert (other != ids).any()
    results = []
    for padded in (ids, other):
        model = build(tiny_config("qwen2"))
        scores = scores_of(model, padded, mask, 1.0)
        weighted(scores, ("logp", "entropy")).backward()
        results.append([*scores, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_4096_tokens_of_a_large_vocabulary_take_15_percent_of_their_logits():
    """Counted: the growth of resident memory from the inputs alone to the peak of forward and backward, so the
    chunks, what is saved between the two, and the gradients of hidden states and weight themselves."""
    done = subprocess.run([sys.executable, SUPPORT / "head_memory.py"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    share, worst = map(float, done.stdout.split())
    assert 0.02 < share < 0.15
    assert worst < 1e-5


def test_a_target_outside_the_vocabulary_has_no_number(by):
    hidden, weight, bias, target = head()
    target[3], target[5] = 53, -100
    logp, entropy = token_logprobs(hidden, weight, bias, target)
    assert logp.isnan().nonzero().flatten().tolist() == [3, 5] and torch.isfinite(entropy).all()


def test_targets_may_be_strided_and_of_32_bits(by):
    hidden, weight, bias, target = head()
    expected, _ = token_logprobs(hidden, weight, bias, target)
    found, _ = token_logprobs(hidden, weight, bias, target.int().repeat(2, 1).T[:, 1])
    assert torch.equal(found, expected)


def test_no_probability_exceeds_one(by):
    """A token that is nearly certain, at a temperature by which no division is exact."""
    hidden = 80 * torch.rand(500, 1, generator=torch.Generator().manual_seed(0)) + 20
    weight = torch.zeros(64, 1)
    weight[7] = 1.0
    logp, entropy = token_logprobs(hidden, weight, None, torch.full((500,), 7), temperature=0.6)
    assert logp.max() <= 0 and entropy.min() >= 0 and logp.min() > -1e-5
