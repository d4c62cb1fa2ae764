import math
import random
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from distributions import assert_follows, probabilities
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybrid_grpo.generation import GREEDY, Sampling, stream_key
from hybrid_grpo.generation.categorical import ONE
from hybrid_grpo.generation.categorical import draw as drawn
from hybrid_grpo.generation.sampler import Sampler, to_lists
from hybrid_grpo.generation.sequence import text_ends

DRAWS = 60_000


def sample(logits_nV, sampling, key_n, counter_n, seen_nV=None):
    return Sampler(sampling)(logits_nV, key_n, counter_n, seen_nV)


def keys(n, *parts):
    return torch.tensor([stream_key(*parts, i) for i in range(n)])


def draw(logits_V, sampling, seed=0, draws=DRAWS, count=0, seen_V=None):
    """`draws` tokens of one distribution, each from a stream of its own, as token `count` of its completion."""
    logits_nV = logits_V.expand(draws, -1)
    seen_nV = None if seen_V is None else seen_V.expand(draws, -1)
    return sample(logits_nV, sampling, keys(draws, seed), torch.full((draws,), count), seen_nV)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (1, 1.0), (4, 1.0), (50, 1.0), (0, 0.7), (0, 0.01), (5, 0.8)])
def test_tokens_follow_the_filtered_softmax(temperature, top_k, top_p):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))
    token_n, logp_n = draw(logits, Sampling(1, temperature, top_k, top_p), seed=round(10 * temperature))
    counts = np.bincount(token_n.numpy(), minlength=12)
    assert_follows(counts, probabilities(logits, temperature, top_k, top_p))
    expected = (logits / temperature).log_softmax(-1)[token_n]
    assert torch.allclose(logp_n, expected, atol=1e-6), "logp is that of the whole softmax, filters or not"


@pytest.mark.parametrize("min_p", [0.02, 0.2, 0.9, 1.0])
@pytest.mark.parametrize("others", [{}, {"temperature": 1.6}, {"top_k": 6, "top_p": 0.9}])
def test_min_p_keeps_what_is_probable_enough(min_p, others):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))
    token_n, _ = draw(logits, Sampling(1, min_p=min_p, **others))
    assert_follows(np.bincount(token_n.numpy(), minlength=12), probabilities(logits, min_p=min_p, **others))


@pytest.mark.parametrize("options", [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "top_k": 5},
    {"logit_bias": ((2, 1.5), (7, -2.0), (3, 0.5)), "temperature": 0.8},
    {"stop_ids": (1, 4), "min_tokens": 3},
    {"repetition_penalty": 1.4, "logit_bias": ((0, 1.0),), "stop_ids": (2,), "min_tokens": 9, "top_p": 0.95},
])  # fmt: skip
def test_penalties_and_biases_are_those_of_transformers(options):
    """What its processors leave, in its order, is the distribution that tokens follow."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(4)) * 1.5
    seen = [0, 3, 5, 6]
    sampling = Sampling(20, **options)
    scores, ids = logits[None], torch.tensor([seen])
    if sampling.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    if sampling.min_tokens:
        # Two tokens of the completion are there: a prompt of two.
        scores = MinNewTokensLengthLogitsProcessor(2, sampling.min_tokens, list(sampling.stop_ids))(ids, scores)
    if sampling.logit_bias:
        scores = SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias})(ids, scores)
    expected = probabilities(scores[0], sampling.temperature, sampling.top_k, sampling.top_p)
    seen_V = torch.zeros(12, dtype=torch.bool).index_fill(0, torch.tensor(seen), True)
    token_n, logp_n = draw(logits, sampling, count=2, seen_V=seen_V)
    assert_follows(np.bincount(token_n.numpy(), minlength=12), expected)
    plain = (logits / sampling.temperature).log_softmax(-1)
    assert torch.allclose(logp_n, plain[token_n], atol=1e-6), "that of the raw logits, whatever was changed"

    token_n, logp_n = draw(logits, replace(sampling, logprobs="sampling"), count=2, seen_V=seen_V)
    assert np.allclose(logp_n.exp().numpy(), expected[token_n.numpy()], rtol=1e-5)


def test_a_bias_outweighs_the_ban_of_nothing_and_greedy_honours_both():
    logits = torch.tensor([0.0, 5.0, 1.0, 2.0])
    sampling = Sampling(9, temperature=GREEDY, stop_ids=(1,), min_tokens=3, logit_bias=((2, 4.0),))
    token_n, logp_n = draw(logits, sampling, draws=1)
    assert token_n.item() == 2
    assert logp_n.item() == pytest.approx(logits.log_softmax(-1)[2].item())


def test_the_chi_square_sees_a_wrong_temperature():
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))
    token_n, _ = draw(logits, Sampling(1, temperature=1.0))
    with pytest.raises(AssertionError):
        assert_follows(np.bincount(token_n.numpy(), minlength=12), probabilities(logits, 1.1, 0, 1.0))


def test_rows_of_different_distributions_do_not_mix():
    logits_nV = torch.randn(40, 9, generator=torch.Generator().manual_seed(2)) * 2
    sampling = Sampling(1, temperature=1.3, top_k=7, top_p=0.9)
    key_n, counter_n = keys(40, 5), torch.arange(40)
    token_n, logp_n = sample(logits_nV, sampling, key_n, counter_n)
    for row in range(40):
        part = slice(row, row + 1)
        alone = sample(logits_nV[part], sampling, key_n[part], counter_n[part])
        assert (token_n[row], logp_n[row]) == (alone[0][0], alone[1][0])


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (17, 1.0), (0, 0.3), (0, 0.9), (10, 0.6), (25, 0.95)])
def test_filters_keep_the_tokens_that_those_of_transformers_keep(top_k, top_p):
    # Gaps of at least 0.02 between logits: draws reach every token kept, and no sum stands on the edge by rounding.
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        logits = (torch.randperm(30, generator=generator) * 0.05 + torch.rand(30, generator=generator) * 0.03)[None]
        scores = TopKLogitsWarper(top_k)(None, logits) if top_k else logits
        scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
        token_n, _ = draw(logits[0], Sampling(1, 1.0, top_k, top_p), seed=seed, draws=6000)
        assert set(token_n.tolist()) == set(scores[0].isfinite().nonzero()[:, 0].tolist())


@pytest.mark.parametrize("vocabulary", [16, 29])
@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8}])
def test_a_mask_names_the_tokens_that_were_left_and_the_distribution_over_them(options, vocabulary):
    """Stop tokens are not among them before the minimum, and the token of a row without a finite logit is."""
    logits_nV = 2 * torch.randn(200, vocabulary, generator=torch.Generator().manual_seed(3))
    logits_nV[-1] = torch.nan
    sampling = Sampling(9, 0.8, logprobs="mask", stop_ids=(1, 4), min_tokens=3, **options)
    chosen = sample(logits_nV, sampling, keys(200, 7), torch.arange(200) % 6)
    tokens, logp, supports = to_lists(chosen)
    for row, (token, support) in enumerate(zip(tokens[:-1], supports[:-1], strict=True)):
        allowed_V = logits_nV[row].clone()
        allowed_V[[1, 4] if row % 6 < 3 else []] = -torch.inf
        kept = probabilities(allowed_V, 0.8, **options).nonzero()[0]
        assert support.tolist() == kept.tolist() and token in kept
        over_kept = (logits_nV[row][kept] / 0.8).log_softmax(-1)
        assert logp[row] == pytest.approx(over_kept[kept.tolist().index(token)].item(), abs=1e-6)
    assert supports[-1].tolist() == [tokens[-1]] == [0] and math.isnan(logp[-1])
    assert len({len(support) for support in supports}) > 2 or "top_k" in options
    plain = sample(logits_nV, replace(sampling, logprobs="sampling"), keys(200, 7), torch.arange(200) % 6)
    assert all(map(partial(torch.allclose, equal_nan=True), plain, chosen[:2])), "nothing else changes"


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.0}, {"top_p": 0.9, "logprobs": "mask"}, {"repetition_penalty": 1.4}]
)
def test_ids_beyond_the_vocabulary_of_the_tokenizer_are_as_if_the_model_had_none(options):
    """They were drawn, and their share was missing from the probabilities of the others."""
    generator, seen_nV = torch.Generator().manual_seed(4), torch.rand(64, 20) < 0.3
    logits_nV = torch.randn(64, 20, generator=generator) + 9 * (torch.arange(20) >= 15)
    given, sampling = (keys(64, 5), torch.zeros(64, dtype=torch.int64)), Sampling(9, **options)
    found = sample(logits_nV, replace(sampling, vocabulary=15), *given, seen_nV)
    assert all(map(torch.equal, found, sample(logits_nV[:, :15].contiguous(), sampling, *given, seen_nV[:, :15])))


def test_greedy_takes_the_first_of_the_most_probable_tokens():
    logits_nV = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, -1.0]])
    token_n, logp_n = sample(logits_nV, Sampling(1, temperature=GREEDY), keys(2), torch.zeros(2, dtype=torch.int64))
    assert token_n.tolist() == [1, 0]
    assert logp_n.tolist() == pytest.approx(logits_nV.log_softmax(-1)[[0, 1], [1, 0]].tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_scored_in_float32(dtype):
    logits_nV = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    for temperature in (GREEDY, 0.7):
        token_n, logp_n = sample(logits_nV, Sampling(1, temperature), keys(50), torch.zeros(50, dtype=torch.int64))
        expected = (logits_nV.double() / (temperature or 1)).log_softmax(-1).gather(1, token_n[:, None])[:, 0]
        assert logp_n.dtype == torch.float32 and torch.allclose(logp_n.double(), expected, atol=1e-5)


def unmix(x):
    """The inverse of SplitMix64's output function, modulo 2^64."""
    mask = 2**64 - 1

    def unshift(x, bits):
        y = x
        for _ in range(64 // bits + 1):
            y = x ^ (y >> bits)
        return y

    x = unshift(x, 31) * pow(0x94D049BB133111EB, -1, 2**64) & mask
    x = unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    return unshift(x, 30)


def key_of(word):
    """The key whose draw 0 comes from the 64-bit `word`."""
    key = (unmix(word) - 0x9E3779B97F4A7C15) % 2**64
    return torch.tensor([key - 2**64 if key >= 2**63 else key])


LOWEST, HIGHEST = key_of(0), key_of(2**64 - 1)
FIRST = torch.zeros(1, dtype=torch.int64)


def test_a_draw_is_the_upper_bits_of_splitmix64():
    assert drawn(LOWEST, FIRST).item() == 0
    assert drawn(HIGHEST, FIRST).item() == ONE - 1
    # The first output of the published generator at seed 0 (Steele, Lea, Flood; java.util.SplittableRandom).
    assert drawn(FIRST, FIRST).item() == 0xE220A8397B1DCDAF >> 41
    assert drawn(FIRST, FIRST + 1).item() == 0x6E789E6AA1B965F4 >> 41


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.999}, {"top_k": 40}, {"top_k": 40, "top_p": 0.9}])
def test_the_first_and_the_last_draw_there_is_choose_tokens_of_positive_probability(filters):
    generator = torch.Generator().manual_seed(0)
    for size in (2, 61, 5000):
        logits = torch.randn(1, size, generator=generator) * 3
        possible = torch.arange(size) % 2 == (size > 2)
        logits[0, ~possible] = float("-inf")
        for key in (LOWEST, HIGHEST):
            token_n, logp_n = sample(logits, Sampling(1, **filters), key, FIRST)
            assert possible[token_n] and logp_n.isfinite().all()


def test_the_ends_of_the_range_are_the_first_and_the_last_token():
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, 0.5, float("-inf")]])
    assert sample(logits, Sampling(1), LOWEST, FIRST)[0].item() == 1
    assert sample(logits, Sampling(1), HIGHEST, FIRST)[0].item() == 3


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 3}])
def test_impossible_tokens_are_never_drawn(filters):
    logits = torch.full((64,), float("-inf"))
    logits[[5, 6, 40, 63]] = torch.tensor([0.0, -60.0, 0.3, -0.2])
    token_n, logp_n = draw(logits, Sampling(1, **filters))
    assert set(token_n.tolist()) <= {5, 40, 63} and logp_n.isfinite().all()


def test_draws_are_uniform_over_streams_and_along_a_stream():
    n = 200_000
    for values in (
        drawn(keys(n, 1), torch.zeros(n, dtype=torch.int64)),
        drawn(keys(1, 2).expand(n), torch.arange(n)),
        # Keys that follow each other, in case a caller numbers streams itself.
        drawn(torch.arange(n), torch.zeros(n, dtype=torch.int64)),
    ):
        u = values.double().numpy() / ONE
        assert u.min() >= 0 and u.max() < 1
        assert_follows(np.bincount((u * 256).astype(int), minlength=256), np.full(256, 1 / 256))
        for power in (1, 2, 3, 4):
            spread = math.sqrt((1 / (2 * power + 1) - 1 / (power + 1) ** 2) / n)
            assert abs((u**power).mean() - 1 / (power + 1)) < 6 * spread


def test_streams_are_independent_of_each_other_and_of_their_own_past():
    streams, length = 300, 2000
    key_n = keys(streams, 3)
    u = drawn(key_n[:, None].expand(-1, length).reshape(-1), torch.arange(length).repeat(streams))
    u = (u.double().view(streams, length) / ONE - 0.5) * math.sqrt(12)
    between = u @ u.T / length
    between.fill_diagonal_(0.0)
    assert between.abs().max() < 6.5 / math.sqrt(length)
    for lag in (1, 2, 7, 64):
        along = (u[:, lag:] * u[:, :-lag]).mean()
        assert abs(along) < 6 / math.sqrt(streams * (length - lag))
        # One stream's draws are not another's, delayed.
        across = (u[1:, lag:] * u[:-1, :-lag]).mean()
        assert abs(across) < 6 / math.sqrt((streams - 1) * (length - lag))


def test_keys_tell_every_part_apart_and_do_not_change():
    parts = list(product(range(6), (0, 1, 11, 111), range(20), (0, 1)))
    assert len({stream_key(*part) for part in parts}) == len(parts)
    assert stream_key(1, 23) != stream_key(12, 3) and stream_key(0, 1) != stream_key(1, 0) != stream_key(1)
    assert all(-(2**63) <= stream_key(i) < 2**63 for i in range(200))
    # Resumed runs go on in the same streams only while keys stay what they are.
    assert [stream_key(0), stream_key(7, 3, 0, 12, 5)] == [8493733112532773764, -808752852439068116]


def letters(token_ids):
    return "".join(map(chr, token_ids))


def utf8(token_ids):
    """A token is a byte."""
    return bytes(token_ids).decode(errors="replace")


def first_end(text, sampling, decode=letters):
    """The number of tokens after which `text` ends, or None."""
    ids = list(text.encode()) if decode is utf8 else list(map(ord, text))
    return next((n for n in range(1, len(ids) + 1) if text_ends(ids[:n], sampling, decode)), None)


@pytest.mark.parametrize(
    ("strings", "end"),
    [((), None), (("x",), None), (("a",), 2), (("ana",), 4), (("nana", "an"), 3), (("banana!",), 7), (("!b",), None)],
)
def test_text_ends_with_the_token_that_completes_a_string(strings, end):
    assert first_end("banana!", Sampling(99, stop_strings=strings)) == end


def test_characters_of_several_tokens():
    text = "né €🙂🙂 x"
    for string in ("é", "€", "🙂", "🙂🙂", "é €🙂🙂 x"):
        end = len(text[: text.index(string) + len(string)].encode())
        assert first_end(text, Sampling(99, stop_strings=(string,)), utf8) == end


def test_only_the_end_is_decoded():
    seen = []

    def decode(token_ids):
        seen.append(len(token_ids))
        return letters(token_ids)

    assert not text_ends([ord("a")] * 10_000, Sampling(99_999, stop_strings=("xya", "x")), decode)
    assert seen == [1, 4 + 4 * 3]


def test_text_is_decoded_only_where_the_token_can_complete_a_string():
    """Of every row at every step that took ten times as long as all else that the host does in a step."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["<answer>7</answer> née 🙂\n\n" * 9, "so x = 3 . Then</answer>\n"], trainer)
    calls = []

    def decode(token_ids):
        calls.append(tuple(token_ids))
        return tokenizer.decode(token_ids)

    rng, ends = random.Random(0), 0
    for strings in (("</answer>",), ("🙂",), ("é", "\n\n"), (" ", "wer>")):
        for _ in range(150):
            ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(40)]
            ids[20:20] = tokenizer.encode(f"so {rng.choice(strings)} x").ids
            texts = [tokenizer.decode(ids[:n]) for n in range(1, len(ids) + 1)]
            expected = next((n for n, text in enumerate(texts, 1) if any(s in text for s in strings)), None)
            sampling = Sampling(99, stop_strings=strings)
            found = next((n for n in range(1, len(ids) + 1) if text_ends(ids[:n], sampling, decode)), None)
            assert found == expected
            ends += found is not None
    assert ends > 500
    calls.clear()
    alone = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
    whole = [token for token, text in alone.items() if not {">", "\ufffd"} & set(text)]
    for n in range(1, 500):
        text_ends([rng.choice(whole) for _ in range(n)], Sampling(999, stop_strings=("</answer>",)), decode)
    assert all(len(ids) == 1 for ids in calls) and len(calls) == len(set(calls))


@pytest.mark.parametrize(("min_tokens", "end"), [(0, 2), (2, 2), (3, 6), (6, 6), (7, 9), (10, None)])
def test_strings_before_the_minimum_are_passed_over_for_good(min_tokens, end):
    """However near the minimum they stand: they used to end a completion at it while they were in what is decoded."""
    assert first_end("..--..-..", Sampling(99, stop_strings=("..",), min_tokens=min_tokens)) == end


def test_strings_need_a_decoder_and_none_need_none():
    assert not text_ends([1, 2], Sampling(9), None)
    with pytest.raises(AssertionError, match="stop strings need `decode`"):
        text_ends([1, 2], Sampling(9, stop_strings=("x",)), None)
