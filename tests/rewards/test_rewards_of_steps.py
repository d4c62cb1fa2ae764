"""Process rewards: what functions may say of steps, what becomes of it, and what is refused."""

import math

import pytest
import torch
from reward_helpers import inline, statuses

from hybrid_grpo.config import GrpoConfig, RewardConfig, RolloutConfig, TrainConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores
from hybrid_grpo.grpo.advantages import mean_over_tokens, token_advantages
from hybrid_grpo.rewards.scorer import Rewards


def rewards(*answers: list, weights=(1.0, 1.0)) -> Rewards:
    """Functions f0, f1, ... that answer for the rows of a call what is listed under their first row's text."""

    def function(answer):
        return lambda completions: [answer[int(text)] for text in completions]

    return Rewards(
        [
            inline(function(answer), name=f"f{i}", weight=weight, batch_size="group")
            for i, (answer, weight) in enumerate(zip(answers, weights, strict=False))
        ]
    )


def scored(*answers: list, lengths: list[int], weights=(1.0, 1.0)) -> tuple[Rollout, Scores]:
    """A rollout of groups of two, scored group by group."""
    prompts = [Prompt(p, "p", [1], {}) for p in range(len(lengths) // 2)]
    rows = [Completion([7] * n, [0.0] * n, "stop", str(row)) for row, n in enumerate(lengths)]
    row_prompts = [prompt for prompt in prompts for _ in range(2)]
    return Rollout(prompts, rows, 2), rewards(*answers, weights=weights).score(row_prompts, rows, 2)


def advantages(rollout: Rollout, scores: Scores, kl_BT=None, names=("f0",), **grpo) -> torch.Tensor:
    config = TrainConfig(
        rollout=RolloutConfig(max_completion_tokens=10),
        grpo=GrpoConfig(**grpo),
        rewards=[RewardConfig(name) for name in names],
    )
    given = config.grpo, 10, config.reward_weights, kl_BT, 0.5, lambda values: values
    return token_advantages(rollout, scores, *given)[0]


def test_steps_and_outcomes_stay_apart():
    whole, steps = [1.0, 0.0, 0.5, 0.5], [[(1, 0.5), (3, 1.0)], [(2, -1.0)], None, []]
    _, scores = scored(whole, steps, lengths=[3, 2, 4, 1], weights=(1.0, 2.0))
    assert scores.by_function["f1"].nan_to_num(-7).tolist() == [1.5, -1.0, -7.0, 0.0]
    assert scores.reward_B.tolist() == [4.0, -2.0, 0.5, 0.5]
    assert scores.outcome_B.tolist() == whole
    assert scores.steps == [[(1, 1.0), (3, 2.0)], [(2, -2.0)], [], []]


def test_without_steps_nothing_changes():
    _, scores = scored([1.0, 0.0], lengths=[3, 2])
    assert scores.steps is None and scores.outcome_B is scores.reward_B


def test_a_number_in_a_group_of_steps_is_one_step_at_the_end():
    """Decided group by group, so that it does not depend on which rank has which group."""
    _, scores = scored([[(1, 2.0)], 1.0, 3.0, 4.0], lengths=[3, 2, 4, 1])
    assert scores.steps == [[(1, 2.0)], [(2, 1.0)], [], []]
    assert scores.outcome_B.tolist() == [0.0, 0.0, 3.0, 4.0]


def test_steps_of_two_functions_with_one_end_are_added_up():
    _, scores = scored([[(1, 1.0), (3, 1.0)], []], [[(2, 5.0), (3, 0.5)], []], lengths=[3, 2], weights=(1.0, 2.0))
    assert scores.steps == [[(1, 1.0), (2, 10.0), (3, 2.0)], []]


@pytest.mark.parametrize(
    "value",
    [
        [(0, 1.0)], [(4, 1.0)], [(2, 1.0), (2, 1.0)], [(2, 1.0), (1, 1.0)], [(1.0, 1.0)], [(True, 1.0)], [(1, "1")],
        [(1, -2e15)], [(1, math.nan)], [(1, 1.0, 1.0)], [1.0], ["ab"], [("0", 1.0), (1, 1.0)], [("0", math.nan)],
        [(b"0", 1.0)],
    ],
)  # fmt: skip
def test_what_are_no_steps_is_a_failure(capfd, value):
    _, scores = scored([[(1, 1.0)], value], lengths=[2, 3])
    assert statuses(scores, "f0") == ["scored", "failed"] and scores.reward_B.isnan().tolist() == [False, True]
    message = capfd.readouterr().err
    assert message.startswith("rewards: f0 returned [") and message.count("\n") == 2
    assert (
        "pairs: (text, reward) with texts that make up the completion, or (end, reward) with ends rising within 1 to 3"
        in message
    )


def test_a_failure_of_any_function_takes_the_steps_of_all():
    _, scores = scored([[(1, 2.0)], [(1, 3.0)]], [math.nan, 1.0], lengths=[3, 2])
    assert scores.steps == [[], [(1, 3.0)]]
    assert scores.outcome_B.nan_to_num(-1).tolist() == [-1.0, 1.0]
    assert scores.reward_B.nan_to_num(-1).tolist() == [-1.0, 4.0]


def test_normalized_steps_are_those_that_end_at_or_after_a_token_beside_the_outcome():
    rollout, scores = scored([1.0, 0.0], [[(1, 1.0), (3, 0.0)], [(2, 0.0)]], lengths=[3, 2])
    # Steps: mean 1/3; outcome: mean 1/2.
    expected = [[0.5 + 2 / 3 - 1 / 3, 0.5 - 1 / 3, 0.5 - 1 / 3], [-0.5 - 1 / 3, -0.5 - 1 / 3, -0.5]]
    advantages_BT = advantages(rollout, scores, scale_rewards="none", step_credit="normalized")
    assert torch.allclose(advantages_BT, torch.tensor(expected))
    means = mean_over_tokens(advantages_BT, rollout)
    assert means.tolist() == pytest.approx([0.5 + (1 / 3 - 1 / 3 - 1 / 3) / 3, -0.5 - 1 / 3])


def test_reward_to_go_takes_length_and_kl_with_the_outcome():
    rollout, scores = scored([1.0, 0.0], [[(1, 1.0), (10, -1.0)], [(2, 0.0)]], lengths=[10, 2])
    kl_BT = torch.tensor([[0.0, 0.0], [0.75, 0.25]])
    advantages_BT = advantages(*(rollout, scores, kl_BT), scale_rewards="none", overlong_buffer=4, overlong_penalty=1.0)
    # Wholes 1 - 1 and 0 - 0.5; to come 0 and 0 at the first token, then -1 and 0.
    assert advantages_BT[0].tolist() == [0.25] + [0.25 - 0.5] * 9
    assert advantages_BT[1, :2].tolist() == [-0.25, -0.25 + 0.5]


def in_letters(tokenizer=None, *answers) -> tuple[Rollout, Scores]:
    """Two completions of three and two tokens, each of which is two letters."""
    prompts = [Prompt(0, "p", [1], {})]
    rows = [Completion([7] * n, [0.0] * n, "stop", "abcdef"[: 2 * n]) for n in (3, 2)]
    one = Rewards([inline(lambda completions: list(answers), batch_size="group", name="f0")], tokenizer=tokenizer)
    return Rollout(prompts, rows, 2), one.score([*prompts, *prompts], rows, 2)


class Pairs:
    """A tokenizer: the n-th token is the n-th pair of letters."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": []}

    def decode(self, token_ids, skip_special_tokens=False):
        return "abcdef"[: 2 * len(token_ids)]


def test_texts_are_steps_that_end_with_the_token_of_their_last_letter():
    _, scores = in_letters(Pairs(), [("a", 1.0), ("b", 2.0), ("", 4.0), ("c", 8.0), ("def", 16.0)], [("abc", 1.0)])
    assert scores.steps == [[(1, 7.0), (2, 8.0), (3, 16.0)], [(2, 1.0)]]
    assert scores.reward_B.tolist() == [31.0, 1.0] == scores.by_function["f0"].tolist()
    _, scores = in_letters(None, [("a", 1.0), ("b", 2.0)], 3.0)
    assert scores.steps == [[(3, 3.0)], [(2, 3.0)]], "without a tokenizer all of them end with the completion"


@pytest.mark.parametrize("text_steps", [[("b", 1.0)], [("ab", 1.0), ("b", 1.0)], [("abcdefg", 1.0)]])
def test_steps_that_are_not_the_text_are_a_failure(capfd, text_steps):
    _, scores = in_letters(Pairs(), text_steps, [("abcd", 1.0)])
    assert statuses(scores, "f0") == ["failed", "scored"] and scores.steps == [[], [(2, 1.0)]]
    message = capfd.readouterr().err
    assert message.startswith("rewards: f0 returned steps that do not make up the text: step '")
    assert "does not stand at character" in message


def test_normalizing_each_reward_is_refused_for_steps():
    rollout, scores = scored([1.0, 0.0], [[(1, 1.0)], []], lengths=[3, 2])
    with pytest.raises(UserError, match=r"grpo.combine_rewards normalize is not defined for rewards of steps: set"):
        advantages(rollout, scores, names=("f0", "f1"), combine_rewards="normalize", scale_rewards="none")


def test_length_and_kl_are_taken_off_the_reward_and_not_off_the_scores():
    rollout, scores = scored([1.0, 1.0], lengths=[8, 10])
    # A buffer of 4 tokens before 10: 8 tokens cost a half, 10 cost 1.
    punished_BT = advantages(rollout, scores, scale_rewards="none", overlong_buffer=4, overlong_penalty=1.0)
    assert punished_BT[:, 0].tolist() == [0.25, -0.25]
    kl_BT = torch.tensor([[0.0, 0.0], [0.75, 0.25]])
    assert advantages(rollout, scores, kl_BT, scale_rewards="none")[:, 0].tolist() == [0.25, -0.25]
    assert scores.reward_B.tolist() == [1.0, 1.0]


def test_gdpo_takes_the_weights_and_the_length_as_one_more_reward():
    rollout, scores = scored([1.0, 0.0], [100.0, 0.0], lengths=[10, 4], weights=(1.0, 3.0))
    names = {"names": ("f0", "f1"), "combine_rewards": "normalize", "scale_rewards": "none"}
    z = 0.5 / (0.5**0.5 + 1e-4)  # of one function of two values 1 apart
    wide = 50 / (5000**0.5 + 1e-4)
    # RewardConfig's weights are 1 here: both functions count alike, whatever their range.
    assert advantages(rollout, scores, **names)[:, 0].tolist() == pytest.approx([z + wide, -z - wide])
    punished = advantages(rollout, scores, **names, overlong_buffer=5)[:, 0].tolist()
    assert punished == pytest.approx([wide, -wide], rel=1e-5)


def test_the_mean_over_tokens_of_one_advantage_is_that_advantage():
    rollout, _ = scored([1.0] * 6, lengths=[7, 3, 9, 1, 10, 6])
    value_B = torch.rand(6)
    assert torch.equal(mean_over_tokens(value_B[:, None].expand(-1, 10), rollout), value_B)
