"""The loss of groups that the policy shares with guests, against its definition in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from objective_formulas import Batch, token_losses

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.data.batch import Numbers, TrainBatch
from hybrid_grpo.features.guests.guests import Guests
from hybrid_grpo.grpo.loss import Objective, micro_batch_loss

BETA = 0.05
WRITERS = ["", "large", "", "seeds", "large", "", "", "seeds", ""]
"""Who wrote each of the rows of a `Batch`; empty is the policy."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": BETA, "entropy_coef": 0.3},
    "dapo": {"epsilon_high": 0.28, "dual_clip": 3.0},
    "gspo": {"importance": "sequence", "loss_type": "grpo", "beta": BETA, "kl_estimator": "k1", "kl_unbiased": True},
    "cispo": {"surrogate": "cispo", "loss_type": "dr_grpo", "entropy_coef": 0.3},
    "truncated": {"sampler_correction": "truncate", "beta": BETA, "sampler_ratio_max": 1.2},
}


def masks(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([writer == name for writer in WRITERS])[:, None] for name in ("large", "seeds")}


def train_batch(batch: Batch, grpo: GrpoConfig, sampler: torch.Tensor, old: torch.Tensor | None) -> TrainBatch:
    micro: Any = SimpleNamespace(mask_bT=batch.mask)
    ref = batch.ref if grpo.beta else None
    return TrainBatch(micro, sampler, old, ref, batch.advantages, batch.weights(grpo.loss_type), masks(batch))


def loss_of(
    batch: TrainBatch, logp: torch.Tensor, entropy: torch.Tensor, grpo: GrpoConfig, own: Objective | None = None
) -> tuple[torch.Tensor, Numbers]:
    """The policy's loss with the guests' term, and the numbers of both."""
    guests = Guests.__new__(Guests)
    given: Any = SimpleNamespace(grpo=grpo), SimpleNamespace(objective=own)
    guests.config, guests.inputs = given
    loss, numbers = micro_batch_loss(batch, logp, entropy, grpo, grpo.beta, own)
    added, of_guests = guests.loss(batch).value(logp, entropy, [])
    return loss + added, numbers | of_guests


def definition(
    batch: Batch, grpo: GrpoConfig, sampler: torch.Tensor, old: torch.Tensor | None, logp: torch.Tensor
) -> torch.Tensor:
    """A guest's token has the surrogate with the ratio to what the guest has recorded; the policy's own also the KL,
    the entropy bonus and the correction for its sampler."""
    rows, weights = [], batch.weights(grpo.loss_type)
    for b, writer in enumerate(WRITERS):
        real = batch.mask[b]
        new, recorded, ref, a, entropy = (
            x[b][real] for x in (logp, sampler, batch.ref, batch.advantages, batch.entropy)
        )
        if writer:
            losses = token_losses(grpo, 0.0, new, recorded, ref, a, 0 * entropy)
        else:
            relative_to = new.detach() if old is None else old[b][real]
            cut = torch.exp(relative_to - recorded).clamp(max=grpo.sampler_ratio_max)
            correction = cut if grpo.sampler_correction == "truncate" else 1.0
            losses = token_losses(grpo, grpo.beta, new, relative_to, ref, a, entropy, correction)
        rows.append((weights[b][real] * losses).sum())
    return torch.stack(rows).sum()


@pytest.mark.parametrize("later", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_are_their_definition(name: str, later: bool) -> None:
    batch, grpo = Batch(3), GrpoConfig(**OBJECTIVES[name])
    noise = 0.5 * torch.randn(batch.logp.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sampler, old = batch.old + noise, batch.old if later else None
    logp = batch.logp.clone().requires_grad_()
    loss, numbers = loss_of(train_batch(batch, grpo, sampler, old), logp, batch.entropy, grpo)
    (gradient,) = torch.autograd.grad(loss, logp)

    expected = definition(batch, grpo, sampler, old, logp)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-7)
    (slopes,) = torch.autograd.grad(expected, logp)
    assert (gradient - slopes).abs().max() < 1e-6 * slopes.abs().max() and not gradient[~batch.mask].any()
    assert numbers.keys() >= {"policy/entropy", "guests/large/ratio_mean", "guests/seeds/clip_frac"}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_policy_s_numbers_are_of_its_own_tokens(name: str) -> None:
    batch, grpo = Batch(3), GrpoConfig(**OBJECTIVES[name])
    own = torch.tensor([not writer for writer in WRITERS])
    mixed = train_batch(batch, grpo, batch.old, batch.old)
    micro: Any = SimpleNamespace(mask_bT=batch.mask[own])
    parts = (batch.old, batch.old, batch.ref if grpo.beta else None, batch.advantages, mixed.weight_bT)
    alone = TrainBatch(micro, *(None if part is None else part[own] for part in parts))  # type: ignore[arg-type]
    _, numbers = loss_of(mixed, batch.logp, batch.entropy, grpo)
    _, expected = micro_batch_loss(alone, batch.logp[own], batch.entropy[own], grpo, grpo.beta)
    for metric, (value, count) in expected.items():
        assert (float(numbers[metric][0]), float(numbers[metric][1])) == pytest.approx((float(value), float(count)))
    for guest, mask in masks(batch).items():
        real = batch.mask & mask
        ratio = (batch.logp - batch.old)[real].exp()
        if grpo.importance == "token":
            assert float(numbers[f"guests/{guest}/ratio_mean"][0]) == pytest.approx(ratio.mean().item())
            assert float(numbers[f"guests/{guest}/ratio_max"][0]) == pytest.approx(ratio.max().item())
        assert int(numbers[f"guests/{guest}/ratio_mean"][1]) == int(real.sum())
        assert 0 <= float(numbers[f"guests/{guest}/clip_frac"][0]) < 1


def test_a_loss_of_one_s_own_is_called_for_every_writer() -> None:
    """Where the tokens are a guest's, without weight for the policy's reference."""
    batch, grpo = Batch(3), GrpoConfig(beta=BETA)
    seen = []

    def objective(logp, old, advantages, weight, grpo, *, beta, ref_logp_bT, entropy_bT, **others):
        seen.append(((weight > 0).any(1).nonzero().flatten().tolist(), beta, ref_logp_bT is batch.ref))
        return (weight * logp).sum()

    mixed = train_batch(batch, grpo, batch.old, None)
    loss, _ = loss_of(mixed, batch.logp, batch.entropy, grpo, objective)
    assert seen == [([0, 2, 5, 6, 8], BETA, True), ([1, 4], 0.0, True), ([3, 7], 0.0, True)]
    assert loss.item() == pytest.approx((mixed.weight_bT * batch.logp)[batch.mask].sum().item())


def test_rows_for_a_teacher_take_no_part_in_the_loss_of_the_policy() -> None:
    """GKD's off-policy rows: they are learned from by other features' terms alone."""
    batch, grpo = Batch(3), GrpoConfig(beta=BETA)
    given = train_batch(batch, grpo, batch.old, batch.old)
    guests = Guests.__new__(Guests)
    guests._distilled = frozenset({"large"})
    config: Any = SimpleNamespace(grpo=grpo), SimpleNamespace(objective=None)
    guests.config, guests.inputs = config
    logp = batch.logp.clone().requires_grad_()
    loss, numbers = guests.loss(given).value(logp, batch.entropy, [])
    assert isinstance(loss, torch.Tensor)
    moved_B = torch.autograd.grad(loss, logp)[0].abs().sum(1) > 0
    assert moved_B.tolist() == [writer == "seeds" for writer in WRITERS]
    assert not any("large" in name for name in numbers)
