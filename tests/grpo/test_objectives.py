"""Objectives against their papers' definitions, completion by completion, in float64: values and gradients."""

import importlib.util
import itertools
import math
from typing import get_args

import pytest
import torch
from paths import ROOT

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.config.presets import presets
from hybrid_grpo.config.types import fields_of, plain_types
from hybrid_grpo.grpo.baselines import BASELINES, SCALES
from hybrid_grpo.grpo.correction import CORRECTIONS
from hybrid_grpo.grpo.loss import AVERAGES, DRIFTS, KL, policy_loss
from hybrid_grpo.grpo.surrogates import LOG_RATIO_LIMIT, LOG_RATIOS, SURROGATES

LIMIT = 8
LENGTHS = [8, 1, 5, 3, 8, 2, 7]
DROPPED = 4
"""A completion that is not in the loss, as one that was cut at the limit."""


class Rows:
    """Ragged completions whose ratios are between 0.2 and 5; NaN where there is no token."""

    def __init__(self, seed, of_tokens=False, on_policy=False):
        draw = torch.Generator().manual_seed(seed)
        shape = (len(LENGTHS), LIMIT)
        self.mask = torch.arange(LIMIT) < torch.tensor(LENGTHS)[:, None]
        self.old = -torch.rand(shape, generator=draw, dtype=torch.float64) * 3 - 0.01
        ratio = torch.exp((2 * torch.rand(shape, generator=draw, dtype=torch.float64) - 1) * math.log(5))
        # A probability is at most 1.
        self.logp = self.old.clone() if on_policy else (self.old + ratio.log()).clamp(max=-1e-3)
        drawn = torch.randn(shape, generator=draw, dtype=torch.float64)
        self.advantages = drawn if of_tokens else drawn[:, :1].expand(shape).clone()
        self.advantages[2] = 0.0
        for tensor in (self.old, self.logp, self.advantages):
            tensor[~self.mask] = math.nan
        self.kept = [row for row in range(len(LENGTHS)) if row != DROPPED]

    def weights(self, loss_type):
        counts = torch.tensor(LENGTHS)[self.kept].double()
        by_type = {
            "dapo": torch.full((len(LENGTHS), 1), 1 / counts.sum().item(), dtype=torch.float64),
            "grpo": 1 / (len(self.kept) * torch.tensor(LENGTHS).double()[:, None]),
            "dr_grpo": torch.full((len(LENGTHS), 1), 1 / (len(self.kept) * LIMIT), dtype=torch.float64),
        }
        weights = by_type[loss_type] * self.mask
        weights[DROPPED] = 0.0
        return weights

    def ours(self, grpo, parts=(slice(None),)):
        """Value and gradient, summed over the parts, as over micro-batches and ranks."""
        logp = self.logp.clone().requires_grad_()
        given = logp, self.old, self.advantages, self.weights(grpo.loss_type)
        loss = sum(policy_loss(*(tensor[part] for tensor in given), grpo, beta=0.0)[0] for part in parts)
        (gradient,) = torch.autograd.grad(loss, logp)
        return loss.item(), gradient

    def paper(self, loss_type, completion):
        """The same of `-completion(logp, old, A)`: a list of tokens' objectives, whose mean over the completion, over
        all tokens, or sum over the longest length is what `loss_type` averages."""
        logp = self.logp.clone().requires_grad_()
        terms = [completion(logp[i][m], self.old[i][m], self.advantages[i][m]) for i, m in self.rows()]
        loss = {
            "dapo": lambda: sum(sum(row) for row in terms) / sum(len(row) for row in terms),
            "grpo": lambda: sum(sum(row) / len(row) for row in terms) / len(terms),
            "dr_grpo": lambda: sum(sum(row) for row in terms) / (len(terms) * LIMIT),
        }[loss_type]()
        (gradient,) = torch.autograd.grad(-loss, logp)
        return -loss.item(), gradient

    def rows(self):
        return [(row, self.mask[row]) for row in self.kept]


def clip(x, low, high):
    return max(min(x, high), low)


def by_tokens(function):
    return lambda logp, old, a: [function(x, o, b) for x, o, b in zip(logp, old, a, strict=True)]


def sapo(logp, old, a):
    """SAPO's f(r) A with f = 4 / tau sigmoid(tau (r - 1))."""
    tau = 1.0 if a > 0 else 1.05
    return 4 / tau / (1 + torch.exp(-tau * (torch.exp(logp - old) - 1))) * a


def gmpo(logp, old, a):
    """GMPO: the geometric mean of min(r^s, clip(r)^s)^s, s being the sign of A, times A."""
    s, product = torch.sign(a[0]), 1.0
    for r in torch.exp(logp - old):
        product = product * min(r**s, clip(r, math.exp(-0.4), math.exp(0.4)) ** s) ** s
    return [product ** (1 / len(logp)) * a[0]] * len(logp)


def dppo_tv(logp, old, a):
    """DPPO's mask on |policy - old| of the sampled token."""
    moved = (logp.exp() - old.exp()).item()
    return 0 * logp if (a > 0 and moved > 0.15) or (a < 0 and moved < -0.15) else torch.exp(logp - old) * a


def dppo_kl(logp, old, a):
    """DPPO's mask on the KL of two outcomes: the sampled token, and any other."""
    p, q = logp.exp().item(), old.exp().item()
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    return 0 * logp if kl > 0.05 and (p - q) * a > 0 else torch.exp(logp - old) * a


def kimi(logp, old, a):
    """Kimi K2.5: no gradient outside the band, and a squared log-ratio."""
    r = torch.exp(logp - old)
    return (r * a if 0.8 <= r <= 1.2 else 0 * logp) - 1e-3 * (logp - old) ** 2


def prime_rl(logp, old, a):
    moved = (logp.exp() - old.exp()).item()
    keeps = moved <= 0.2 if a > 0 else moved >= -0.2
    return torch.exp(logp - old) * a * keeps - 1e-3 * (logp - old) ** 2


def rloo(logp, old, a):
    """PPO's objective with the completion as one action."""
    r = torch.exp((logp - old).sum())
    return [min(r * a[0], clip(r, 0.8, 1.2) * a[0])] * len(logp)


def gspo(logp, old, a):
    s = torch.exp((logp - old).mean())
    return [min(s * a[0], clip(s, 1 - 3e-4, 1 + 4e-4) * a[0])] * len(logp)


def deepseek(logp, old, a):
    """DeepSeek-V3.2, eq. 9, without the KL; eq. 8's min is PPO's."""
    far = (old - logp).mean().item() > 0.5
    r = torch.exp(logp - old)
    terms = [min(x * b, clip(x, 0.8, 1.2) * b) for x, b in zip(r, a, strict=True)]
    return [0 * x if far and b < 0 else x for x, b in zip(terms, a, strict=True)]


DEFINITIONS = {
    "sapo": by_tokens(sapo), "gmpo": gmpo, "dppo": by_tokens(dppo_tv), "dppo_kl": by_tokens(dppo_kl),
    "kimi_k2.5": by_tokens(kimi), "prime_rl": by_tokens(prime_rl), "rloo": rloo, "gspo": gspo, "luspo": gspo,
    "kl_cov": by_tokens(lambda logp, old, a: torch.exp(logp - old) * a - abs(logp - old)), "deepseek_v3.2": deepseek,
}  # fmt: skip
OF_TOKENS = ("sapo", "dppo", "dppo_kl", "kimi_k2.5", "prime_rl", "kl_cov", "deepseek_v3.2")
OF_ONE_TOKEN = ("cispo", "gmpo", "dppo_tv", "dppo_kl")
"""Surrogates that take the ratio of a token alone."""


def of(name):
    # The KL is tested by itself (test_loss.py); here there is no reference.
    kl = ("beta", "kl_in", "kl_estimator", "kl_unbiased")
    return GrpoConfig(**{key: value for key, value in presets()[name]["sets"].items() if key not in kl})


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("seed", range(4))
def test_a_loss_is_that_of_its_paper(name, seed):
    for of_tokens in (False, True) if name in OF_TOKENS else (False,):
        rows, grpo = Rows(seed, of_tokens), of(name)
        value, gradient = rows.ours(grpo)
        expected, slopes = rows.paper(grpo.loss_type, DEFINITIONS[name])
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert (gradient - slopes).abs().max() < 1e-9 * slopes.abs().max()
        again, pieces = rows.ours(grpo, [slice(i, i + 2) for i in range(0, len(LENGTHS), 2)])
        assert again == pytest.approx(value, rel=1e-12) and torch.allclose(pieces, gradient, rtol=1e-12, atol=0)


def test_every_name_of_a_setting_is_an_entry_of_its_table():
    tables = {"loss_type": AVERAGES, "importance": LOG_RATIOS, "surrogate": SURROGATES, "baseline": BASELINES}
    tables |= {"scale_rewards": SCALES, "kl_estimator": KL, "drift": DRIFTS, "sampler_correction": CORRECTIONS}
    for name, table in tables.items():
        assert set(get_args(plain_types(fields_of(GrpoConfig)[name])[0])) == table.keys(), name


def test_every_definition_meets_both_sides_of_its_bounds():
    """Or the test above would compare what all objectives have in common."""
    for name in DEFINITIONS:
        plain = GrpoConfig(surrogate="ratio", loss_type=of(name).loss_type)
        if name != "kl_cov":  # it has no bounds
            assert any((Rows(s).ours(of(name))[1] - Rows(s).ours(plain)[1]).abs().max() > 1e-3 for s in range(4)), name


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("importance", LOG_RATIOS)
def test_on_policy_every_gradient_is_that_of_reinforce_and_nothing_is_clipped(surrogate, importance):
    if importance != "token" and surrogate in OF_ONE_TOKEN:
        return
    grpo = GrpoConfig(surrogate=surrogate, importance=importance, loss_type="grpo", drift_coef=0.3, off_policy_mask=0.1)
    rows = Rows(1, of_tokens=importance != "product", on_policy=True)
    times = torch.tensor(LENGTHS)[:, None] if importance == "product" else 1
    expected = -rows.weights("grpo") * rows.advantages.nan_to_num() * times
    assert torch.allclose(rows.ours(grpo)[1], expected, rtol=1e-12, atol=1e-15)
    _, stats = policy_loss(rows.logp, rows.old, rows.advantages, rows.weights("grpo"), grpo, beta=0.0)
    assert (stats.clipped_low, stats.clipped_high, stats.ratio_max) == (0, 0, 1)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_surrogate_counts_what_it_cuts(surrogate):
    """What is cut has no gradient, except with cispo, which cuts the weight; an advantage of 0 is never cut."""
    rows = Rows(2, of_tokens=True)
    grpo = GrpoConfig(surrogate=surrogate, loss_type="dr_grpo")
    weights = rows.weights("dr_grpo")
    _, stats = policy_loss(rows.logp, rows.old, rows.advantages, weights, grpo, beta=0.0)
    gradient = rows.ours(grpo)[1][weights > 0]
    still = (gradient == 0) & (rows.advantages[weights > 0] != 0)
    cut = int(stats.clipped_low + stats.clipped_high)
    if surrogate == "cispo":
        assert cut > 0 and not still.any()
    else:
        assert cut == int(still.sum()) and (cut > 0) == (surrogate not in ("sapo", "ratio"))


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"training_scripts/objectives/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def vespo(logp, old, a):
    """w^k e^(lambda (1 - w)) A log policy, without a gradient through w."""
    w = math.exp((logp - old).sum().item())
    return [w**k * math.exp(c * (1 - w)) * b * x for x, b in zip(logp, a, strict=True)
            for k, c in [(2, 3) if b >= 0 else (3, 2)]]  # fmt: skip


def dro(logp, old, a):
    return [-((a[0] - 0.3 * (logp - 2 * old).sum()) ** 2) / 2] * len(logp)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name, definition", [("vespo", vespo), ("dro", dro)])
def test_the_examples_of_own_objectives_are_those_of_their_papers(name, definition, seed):
    rows, objective = Rows(seed), example(name)
    logp = rows.logp.clone().requires_grad_()
    # A reference of the squared probabilities.
    others = {"beta": 0.3, "ref_logp_bT": 2 * rows.old, "entropy_bT": None, "correction_bT": None}
    given = rows.old, rows.advantages, rows.weights("grpo"), GrpoConfig(loss_type="grpo")
    loss = objective(logp, *given, **others)
    expected, slopes = rows.paper("grpo", definition)
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert (gradient.nan_to_num(nan=9.0) - slopes).abs().max() < 1e-9 * slopes.abs().max()
    empty = [torch.where(rows.mask, x, math.nan)[:1] for x in (logp, *given[:2])]
    assert objective(*empty, torch.zeros(1, LIMIT).double(), given[3], **others | {"ref_logp_bT": empty[1]}) == 0


def a2po_of_groups(rows, group_of):
    """The squared distance of r - V and beta log(policy / reference), with V = 0.5 log mean exp(r / 0.5)."""
    logp, loss = rows.logp.clone().requires_grad_(), 0.0
    for row, mask in rows.rows():
        members = [other for other in rows.kept if group_of[other] == group_of[row]]
        value = 0.5 * math.log(sum(math.exp(rows.advantages[other, 0] / 0.5) for other in members) / len(members))
        log_ratio = (logp[row] - 2 * rows.old[row])[mask].sum()
        loss = loss + (rows.advantages[row, 0] - value - 0.3 * log_ratio) ** 2 / len(rows.kept)
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.item(), gradient


def tpo_of_groups(rows, group_of):
    """-sum q log p of each group's completions that count, averaged over completions: equations 1 to 3."""
    logp, loss = rows.logp.clone().requires_grad_(), 0.0
    for group in set(group_of):
        members = [(row, mask) for row, mask in rows.rows() if group_of[row] == group]
        n = len(members)
        old, new = (torch.stack([x[row][mask].sum() for row, mask in members]) for x in (rows.old, logp))
        # The advantages were divided by the unbiased deviation.
        u = torch.stack([rows.advantages[row, 0] for row, _ in members]) * math.sqrt(n / max(n - 1, 1))
        p_old, p = old.exp() / old.exp().sum(), new.exp() / new.exp().sum()
        q = p_old * u.exp() / (p_old * u.exp()).sum()
        loss = loss - (q * p.log()).sum() * n / len(rows.kept)
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.item(), gradient


@pytest.mark.parametrize("name, definition", [("a2po", a2po_of_groups), ("tpo", tpo_of_groups)])
@pytest.mark.parametrize("seed", range(4))
def test_examples_of_whole_groups_are_those_of_their_papers_wherever_rows_stand(name, definition, seed):
    rows, objective, group_of = Rows(seed), example(name), [3, 0, 3, 0, 3, 0, 7]
    given = rows.old, rows.advantages, rows.weights("grpo"), torch.tensor(group_of)
    expected, slopes = definition(rows, group_of)
    for parts in ([range(7)], [[0, 2, 4], [6, 5, 3, 1]]):
        logp = rows.logp.clone().requires_grad_()
        loss = 0.0
        for part in parts:
            old, advantages, weights, group_b = (tensor[list(part)] for tensor in given)
            others = {"group_b": group_b, "beta": 0.3, "ref_logp_bT": 2 * old}
            loss = loss + objective(logp[list(part)], old, advantages, weights, None, **others)
        assert loss.item() == pytest.approx(expected, rel=1e-9)
        (gradient,) = torch.autograd.grad(loss, logp)
        assert (gradient - slopes).abs().max() < 1e-9 * slopes.abs().max()
    # At the target there is nothing left to learn.
    reached = rows.old.clone().requires_grad_()
    others = {"group_b": given[3], "beta": 0.3, "ref_logp_bT": rows.old}
    still = objective(reached, rows.old, 0 * rows.advantages, *given[2:3], None, **others)
    assert torch.autograd.grad(still, reached)[0].abs().max() < 1e-12
    filler, others = torch.zeros(1, 1, requires_grad=True), {**others, "ref_logp_bT": torch.zeros(1, 1)}
    nothing = objective(filler, *torch.zeros(3, 1, 1), None, **others | {"group_b": torch.zeros(1, dtype=torch.int64)})
    assert nothing == 0 and torch.autograd.grad(nothing, filler)[0] == 0


def test_tpo_learns_as_exactly_from_long_completions_as_their_log_probabilities_are():
    """They were added up in float32, and what a group learns is a small difference of functions of such sums: already
    after 12 tokens, gradients on one rank and on two differed by 2e-4, and after three steps their losses by 2e-5."""
    draw, tpo = torch.Generator().manual_seed(0), example("tpo")
    logp_T = -3 * torch.rand(400, generator=draw)
    old = torch.stack([logp_T[torch.randperm(400, generator=draw)] for _ in range(4)])
    logp = old + 1e-3 * torch.randn(4, 400, generator=draw)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        given = [x.to(dtype) for x in (logp, old, torch.zeros(4, 400), torch.full((4, 400), 1 / 1600))]
        given[0].requires_grad_()
        gradients += torch.autograd.grad(tpo(*given, None, group_b=torch.zeros(4).long()), given[0])
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5 * gradients[1].abs().max()


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("importance", ["token", "sequence"])
def test_certain_tokens_and_distant_policies_stay_finite(surrogate, importance):
    values, half = [0.0, -1e-20, -1e-8, -1.0, -50.0, -1e4, -1e30], torch.full((1, 2), 0.5)
    if importance != "token" and surrogate in OF_ONE_TOKEN:
        return
    options = {"surrogate": surrogate, "importance": importance, "off_policy_mask": 0.5, "kl_unbiased": True}
    grpo = GrpoConfig(**options, dual_clip=1.5 if surrogate == "clip" else None, beta=0.1)
    for new, old, a in itertools.product(values, values, (1.0, -1.0)):
        logp, other = torch.full((1, 2), new, requires_grad=True), torch.full((1, 2), old)
        loss, stats = policy_loss(logp, other, 2 * a * half, half, grpo, beta=0.1, ref_logp_bT=other)
        loss.backward()
        assert loss.isfinite() and logp.grad.isfinite().all() and stats.kl.isfinite(), (new, old, a)
        assert stats.ratio_max <= math.exp(LOG_RATIO_LIMIT) * (1 + 1e-6), (new, old, a)
