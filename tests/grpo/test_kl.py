import pytest
import torch
from rank_threads import in_ranks

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.data.batch import Numbers
from hybrid_grpo.distributed.ranks import all_reduce
from hybrid_grpo.grpo.controllers import KlController

ADAPTED = GrpoConfig(beta=0.1, kl_target=0.02)


def numbers(kl: float, tokens: int) -> Numbers:
    """Of a micro-batch whose tokens have this KL together."""
    return {"policy/kl": (torch.tensor(kl) / tokens, tokens)} if tokens else {}


@pytest.mark.parametrize("kl, factor", [(0.02, 1.0), (0.022, 1 + 0.1 * 0.05), (9.0, 1 + 0.2 * 0.05), (0.0, 0.99)])
def test_beta_follows_the_kl_per_token_of_a_step(kl, factor):
    controller = KlController(ADAPTED, rows=500, device=torch.device("cpu"))
    for share in (0.25, 0.75):
        controller.add(numbers(kl * 100 * share, 50))
    controller.update(all_reduce)
    assert controller.beta == pytest.approx(0.1 * factor)
    # Nothing of the step before is left.
    controller.add(numbers(2.0, 100))
    controller.update(all_reduce)
    assert controller.beta == pytest.approx(0.1 * factor)


def test_the_kl_is_that_of_all_ranks():
    """Of few tokens far from the reference, and of many near it; a rank without any has the same weight of the KL."""
    seen = [(0.0, 0), (4.0, 10), (0.0, 190)]

    def updated(rank: int) -> float:
        controller = KlController(ADAPTED, rows=500, device=torch.device("cpu"))
        controller.add(numbers(*seen[rank]))
        controller.update(all_reduce)
        return controller.beta

    # 0.02 nats per token, which is the target: by any rank's own the weight would move.
    assert in_ranks(3, updated) == [pytest.approx(0.1, rel=1e-6)] * 3


def test_a_step_without_tokens_and_a_fixed_beta_change_nothing():
    for grpo, seen in ((ADAPTED, numbers(0.0, 0)), (GrpoConfig(beta=0.1), numbers(9.0, 10))):
        controller = KlController(grpo, rows=500, device=torch.device("cpu"))
        controller.add(seen)
        controller.update(all_reduce)
        assert controller.beta == 0.1


def test_a_resumed_run_goes_on_with_beta_and_one_without_target_with_its_own():
    before = KlController(ADAPTED, rows=500, device=torch.device("cpu"))
    before.add(numbers(9.0, 1))
    before.update(all_reduce)
    for grpo, beta in ((ADAPTED, before.beta), (GrpoConfig(beta=0.3), 0.3)):
        after = KlController(grpo, rows=500, device=torch.device("cpu"))
        after.load_state_dict(before.state_dict())
        assert after.beta == beta
