"""Tokens that are chosen over all ranks, against sorting all of them in one place."""

import numpy as np
import pytest
import torch
from rank_threads import in_ranks

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.data.batch import Completion, Prompt, Rollout
from hybrid_grpo.distributed.ranks import all_reduce
from hybrid_grpo.grpo.selection import OldPolicy, nth_largest, select_tokens


@pytest.mark.parametrize("seed", range(6))
def test_the_nth_largest_of_all_ranks(seed):
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(1000, generator=draw) * torch.exp(5 * torch.randn(1000, generator=draw))
    values[:100] = values[100:200]
    values[200:210] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-45, -1e-45, 3e38, -3e38, 1.0, -1.0])
    parts = values.split([400, 0, 1, 599])
    ordered = values.sort(descending=True).values
    for n in (1, 2, 57, 500, 999, 1000):
        found = in_ranks(4, lambda rank, n=n: nth_largest(parts[rank], n, all_reduce))
        assert set(found) == {float(ordered[n - 1])}


def rollout_of(seed, groups):
    stream = np.random.default_rng(seed)
    completions, others = [], []
    for row in range(groups * 2):
        length = int(stream.integers(1, 40))
        ids = stream.integers(0, 1000, length).tolist()
        learned, writer = row % 7 != 3, "guest" if row % 7 == 5 else ""
        completions.append(Completion(ids, [-1.0] * length, "stop", writer=writer, learned=learned))
        others.append(stream.standard_normal((3, 40)))
    prompts = [Prompt(100 * seed + i, "x", [1], {}) for i in range(groups)]
    rollout = Rollout(prompts, completions, 2)
    width = max(rollout.lengths)
    advantages, logp, entropy = torch.from_numpy(np.stack(others, 1)[:, :, :width]).float()
    return rollout, advantages, OldPolicy(-logp.abs(), entropy.abs())


SETTINGS = {
    "top_entropy": {"tokens_share": 0.2},
    "clip_cov": {"tokens_share": 0.05, "cov_low": 0.5, "cov_high": 2.0},
    "kl_cov": {"tokens_share": 0.1, "drift_coef": 1.0},
}


@pytest.mark.parametrize("tokens", SETTINGS)
def test_tokens_are_those_of_the_papers_on_any_number_of_ranks(tokens):
    grpo = GrpoConfig(tokens=tokens, **SETTINGS[tokens])
    parts = [rollout_of(seed, groups) for seed, groups in ((0, 6), (1, 1), (2, 9))]
    found = in_ranks(3, lambda rank: select_tokens(*parts[rank], grpo, all_reduce))
    owns = [r.mask_BT & torch.tensor([c.learned and not c.writer for c in r.completions])[:, None] for r, _, _ in parts]
    gathered = [torch.cat([value[own] for value, own in zip(values, owns, strict=True)]) for values in (
        [a for _, a, _ in parts], [old.logp_BT for _, _, old in parts], [old.entropy_BT for _, _, old in parts]
    )]  # fmt: skip
    a, logp, entropy = (value.double().numpy() for value in gathered)
    count = len(a)
    number = int(np.ceil(grpo.tokens_share * count))
    covariance = (a - a.mean()) * (logp - logp.mean())
    after = torch.cat([new[own] for (new, _, _), own in zip(found, owns, strict=True)]).numpy()
    if tokens == "kl_cov":
        chosen = torch.cat([drifts[own] for (_, drifts, _), own in zip(found, owns, strict=True)]).numpy()
        assert set(np.argsort(-covariance)[:number]) == set(np.flatnonzero(chosen))
        assert np.array_equal(after, gathered[0].numpy())
    elif tokens == "top_entropy":
        assert set(np.argsort(-entropy)[:number]) == set(np.flatnonzero(after))
    else:
        left_out = np.flatnonzero(after == 0)
        assert len(left_out) == number and ((covariance[left_out] > 0.5) & (covariance[left_out] < 2)).all()
        assert ((covariance > 0.5) & (covariance < 2)).sum() > 2 * number, "some are drawn, not all"
        shares = [float(new[own].eq(0).float().mean()) for (new, _, _), own in zip(found, owns, strict=True)]
        assert min(shares[0], shares[2]) > 0
    for (new, drifts, numbers), (_, old, _), own in zip(found, parts, owns, strict=True):
        assert torch.equal(new[~own], old[~own]), "completions of others keep their advantages"
        assert numbers["policy/selected_frac"][1] == own.sum()
        assert (drifts is None) == (tokens != "kl_cov")
    # One rank with everything chooses the same; rows keep their order.
    width = max(a.shape[1] for _, a, _ in parts)

    def padded(x):
        return torch.nn.functional.pad(x, (0, width - x.shape[1]))

    whole = Rollout(*([one for r, _, _ in parts for one in getattr(r, name)] for name in ("prompts", "completions")), 2)
    old = OldPolicy(*(torch.cat([padded(getattr(o, name)) for _, _, o in parts]) for name in ("logp_BT", "entropy_BT")))
    alone, drifts, _ = select_tokens(whole, torch.cat([padded(a) for _, a, _ in parts]), old, grpo, lambda x: x)
    assert torch.equal(alone, torch.cat([padded(new) for new, _, _ in found]))
    if drifts is not None:
        assert torch.equal(drifts, torch.cat([padded(d) for _, d, _ in found]))


def test_tokens_that_the_loss_leaves_out_take_no_share():
    """Completions that were cut had the highest entropies, took all of top_entropy's share, and nothing was learned."""
    finishes = ["stop", "length", "stop", "length"]
    rollout = Rollout([Prompt(0, "x", [1], {})], [Completion([7] * 10, [-1.0] * 10, f) for f in finishes], 4)
    old = OldPolicy(torch.full((4, 10), -1.0), torch.arange(40.0).view(4, 10))
    grpo = GrpoConfig(tokens="top_entropy", tokens_share=0.2, mask_truncated=True)
    new, _, numbers = select_tokens(rollout, torch.ones(4, 10), old, grpo, lambda x: x)
    assert torch.equal(new[2].nonzero().view(-1), torch.arange(6, 10)) and not new[0].any()
    assert [float(number) for number in numbers["policy/selected_frac"]] == [0.2, 20]


def test_nothing_to_choose_from_is_no_error():
    rollout, advantages, old = rollout_of(3, 1)
    none = Rollout(
        rollout.prompts, [Completion(c.token_ids, c.logp, "stop", learned=False) for c in rollout.completions], 2
    )
    for tokens, settings in SETTINGS.items():
        new, _, _ = select_tokens(none, advantages, old, GrpoConfig(tokens=tokens, **settings), lambda x: x)
        assert torch.equal(new, advantages)


@pytest.mark.parametrize("tokens", ["top_entropy", "kl_cov"])
def test_rounding_does_not_decide_among_tokens_that_are_alike(tokens):
    """The completions of a prompt begin alike, and another number of ranks rounds their numbers in another way."""
    rollout = Rollout([Prompt(0, "x", [1], {})], [Completion([7, 8, 9], [0.0] * 3, "stop") for _ in range(4)], 4)
    grpo = GrpoConfig(tokens=tokens, tokens_share=0.17, drift_coef=1.0)
    chosen, signs_B1 = [], torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    for seed in range(8):
        noise = 1 + 2e-7 * torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        entropy_BT, logp_BT = torch.tensor([1.7, 1.0, 0.5]) * noise, torch.tensor([-0.3, -1.0, -2.0]) * noise
        advantages_BT, drifts_BT, _ = select_tokens(
            rollout, signs_B1 * noise.roll(1, 0), OldPolicy(logp_BT, entropy_BT), grpo, lambda x: x
        )
        chosen.append((advantages_BT != 0 if drifts_BT is None else drifts_BT).tolist())
    assert chosen == [chosen[0]] * 8
    # Of covariances, 0.9 in the second and fourth completion comes before 0.8 in the others.
    up, down = [True, False, False], [False, False, True]
    assert chosen[0] == ([up] * 4 if tokens == "top_entropy" else [up, down] * 2)
