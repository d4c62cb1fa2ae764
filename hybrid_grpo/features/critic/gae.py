"""Advantages from the rewards and the values of tokens.

`critic_advantages` does the whole computation for the settings of a run; the functions after it are its parts. As in
`grpo/advantages.py`, arithmetic is float64 on the CPU, and the caller passes `sum_over_ranks`, which sums over ranks.

The value of a token is the expected reward from that token on, before the token is sampled. A completion that is cut at
the length limit is treated like one that ended by itself: after its last token the value is 0, as in InstructGPT
(arXiv:2203.02155) and TRL. PPO is arXiv:1707.06347, GAE is arXiv:1506.02438.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.data.batch import Numbers, RewardStep, Rollout, Scores
from hybrid_grpo.distributed.ranks import sum_over_ranks
from hybrid_grpo.features.critic.settings import CriticConfig
from hybrid_grpo.grpo.advantages import penalized_rewards
from hybrid_grpo.grpo.baselines import Total

_STD_EPSILON = 1e-4  # keeps nearly equal advantages from being scaled up to size 1


@dataclass(frozen=True)
class ValueTargets:
    """What the critic needs to learn from a rollout; float32 [B, T], on the critic's device."""

    old_value_BT: Tensor
    """The critic's values before it learns from the rollout."""
    return_BT: Tensor
    """The targets of the values; NaN on padding and for completions without a reward."""


def critic_advantages(
    rollout: Rollout,
    scores: Scores,
    config: TrainConfig,
    value_BT: Tensor,
    kl_BT: Tensor | None,
    beta: float,
    device: torch.device,
) -> tuple[Tensor, ValueTargets, Numbers]:
    """Compute the advantages of all tokens by GAE, and the critic's targets. Collective.

    A completion earns its reward, including the length penalty, at its last token, and step rewards at the last tokens
    of the steps. A completion without a reward has advantage 0, and the critic does not learn from it.

    Args:
        value_BT: the critic's values.
        kl_BT: the KL of each token in nats; None if the KL is not part of the reward.
        beta: the amount that is subtracted from the reward per nat of this KL.
        device: for collectives.

    Returns:
        Advantages, float32 [B, T] on the CPU, 0 on padding; the targets; and the critic's metrics.
    """
    settings, total = config.of(CriticConfig), partial(sum_over_ranks, device=device)
    limit = config.rollout.max_completion_tokens
    whole_B, numbers = penalized_rewards(rollout, scores, config.grpo, limit, config.reward_weights)
    reward_BT = token_rewards(whole_B, scores.steps, rollout.lengths)
    if kl_BT is not None:
        # Token by token, as in InstructGPT.
        reward_BT -= beta * kl_BT.double().cpu()
    mask_BT = rollout.mask_BT & ~whole_B.isnan()[:, None]
    old_BT = value_BT.cpu().double()
    advantage_BT = generalized_advantages(reward_BT, old_BT, mask_BT, settings.gamma, settings.lam)
    return_BT = advantage_BT + old_BT
    mean_3, variance_3 = moments((advantage_BT, return_BT, return_BT - old_BT), mask_BT, total)
    if settings.whiten:
        whitened_BT = (advantage_BT - mean_3[0]) / (variance_3[0].sqrt() + _STD_EPSILON)
        advantage_BT = torch.where(mask_BT, whitened_BT, 0.0)
    here = mask_BT.sum()
    numbers["critic/value"] = old_BT[mask_BT].mean(), here
    numbers["critic/return"] = return_BT[mask_BT].mean(), here
    # If returns are equal, their variance is rounding noise, and there is nothing to explain.
    explains = variance_3[1] > 1e-12 * (1 + mean_3[1].square())
    numbers["critic/explained_variance"] = 1 - variance_3[2] / variance_3[1], explains.long()
    targets = ValueTargets(value_BT.float(), torch.where(mask_BT, return_BT, torch.nan).float().to(value_BT.device))
    return advantage_BT.float(), targets, numbers


def token_rewards(whole_B: Tensor, steps: list[list[RewardStep]] | None, lengths: list[int]) -> Tensor:
    """Return the reward of each token, float64 [B, T], 0 on padding.

    Args:
        whole_B: rewards of whole completions, earned at their last tokens.
        steps: [B], for each completion the (end, reward) of its steps: `end` is the number of tokens up to and
            including the last token of the step, which earns the reward.
        lengths: [B], number of completion tokens.
    """
    places = [(row, length - 1) for row, length in enumerate(lengths)]
    rewards = whole_B.tolist()
    for row, ends in enumerate(steps or []):
        places += [(row, end - 1) for end, _ in ends]
        rewards += [reward for _, reward in ends]
    reward_BT = torch.zeros(len(lengths), max(lengths), dtype=torch.float64)
    rows, tokens = torch.tensor(places).unbind(1)
    reward_BT.index_put_((rows, tokens), torch.tensor(rewards, dtype=torch.float64), accumulate=True)
    return reward_BT


def generalized_advantages(reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages of tokens by GAE(gamma, lambda), arXiv:1506.02438, equations 11 to 16; 0 outside the mask.

    With d_t = r_t + gamma V_{t+1} - V_t, where V is 0 after the last token of a row, A_t = d_t + gamma lambda A_{t+1}.
    Lambda 1 gives the discounted future rewards minus V_t, lambda 0 gives d_t.

    Args:
        reward_BT, value_BT: floats; ignored outside the mask, even if NaN.
        mask_BT: bool, True on the tokens of each completion, which begin in the first column.
    """
    reward_BT, value_BT = (torch.where(mask_BT, x, 0.0) for x in (reward_BT, value_BT))
    advantage_BT = torch.zeros_like(value_BT)
    next_value_B = next_advantage_B = torch.zeros_like(value_BT[:, 0])
    for t in reversed(range(value_BT.shape[1])):
        delta_B = reward_BT[:, t] + gamma * next_value_B - value_BT[:, t]
        next_advantage_B = delta_B + gamma * lam * next_advantage_B
        next_value_B = value_BT[:, t]
        advantage_BT[:, t] = next_advantage_B
    return advantage_BT


def moments(values: tuple[Tensor, ...], mask_BT: Tensor, sum_over_ranks: Total) -> tuple[Tensor, Tensor]:
    """Return the mean and unbiased variance, float64 [K] each, of K tensors [B, T] over the tokens of all ranks; 0 if
    there are no tokens."""
    values_KN = torch.stack([value_BT[mask_BT].double() for value_BT in values])
    here = torch.tensor([values_KN.shape[1]], dtype=torch.float64)
    *_, count = sums = sum_over_ranks(torch.cat([values_KN.sum(1), here]))
    mean_K = sums[:-1] / count.clamp(min=1)
    squares_K = sum_over_ranks((values_KN - mean_K[:, None]).square().sum(1))
    return mean_K, squares_K / (count - 1).clamp(min=1)
