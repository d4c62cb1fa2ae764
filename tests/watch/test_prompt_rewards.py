import random
from itertools import product

import numpy as np
import pytest

from hybrid_grpo.watch import prompt_rewards
from hybrid_grpo.watch.prompt_rewards import ORDERS, PromptRewards


def drawn(steps: int, prompts: int, each: int) -> list[tuple[int, int, float]]:
    """Step, prompt and reward; rows in the data are far apart and come in no order."""
    chance = random.Random(0)
    rows = [7 * prompt + 100 for prompt in range(prompts)]
    return [(step, row, chance.random()) for step in range(1, steps + 1) for row in chance.sample(rows, each)]


def gathered(entries: list[tuple[int, int, float]]) -> PromptRewards:
    rewards = PromptRewards()
    for step in dict.fromkeys(step for step, _, _ in entries):
        rewards.append(step, [[row, reward, 0.1] for at, row, reward in entries if at == step])
    return rewards


def order_of(entries: list[tuple[int, int, float]], order: str) -> list[int]:
    values: dict[int, list[float]] = {}
    for _, row, reward in entries:
        values.setdefault(row, []).append(reward)
    key = {"row": lambda row: row, "mean": lambda row: np.mean(values[row]), "last": lambda row: values[row][-1]}[order]
    return sorted(values, key=key)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("part", [(0, 50, 1, 40), (10, 23, 5, 17), (49, 50, 40, 40)])
def test_a_map_is_the_mean_of_the_entries_of_each_cell(
    order: str, part: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    low, high, first, last = part
    entries = drawn(40, 50, 20)
    monkeypatch.setattr(prompt_rewards, "_BLOCK", 64)
    rewards = gathered(entries)
    cells = rewards.map(order, low, high, first, last, rows=20, columns=30)
    names = order_of(entries, order)
    assert rewards.ordered(order).tolist() == names
    assert cells.means.shape == (-(-(high - low) // cells.tall), -(-(last - first + 1) // cells.wide))
    for row, column in product(*map(range, cells.means.shape)):
        inside = [
            reward
            for step, name, reward in entries
            if low + row * cells.tall <= names.index(name) < min(high, low + (row + 1) * cells.tall)
            and first + column * cells.wide <= step < min(last + 1, first + (column + 1) * cells.wide)
        ]
        assert cells.counts[row, column] == len(inside)
        expected = np.mean(inside) if inside else np.nan
        np.testing.assert_allclose(cells.means[row, column], expected, rtol=1e-6)


def test_most_cells_are_filled_however_few_prompts_a_step_draws() -> None:
    rewards = gathered(drawn(500, 200, 4))
    cells = rewards.map("row", 0, 200, 1, 500, rows=100, columns=400)
    assert cells.means.shape[0] == 100
    assert np.mean(cells.counts > 0) > 0.5


def test_what_is_no_entry_is_passed_over() -> None:
    rewards = PromptRewards()
    for prompts in (None, [], {}, [None], [["a", 1.0]], [[1]], [[1, None]], [[1.5, 1.0]], [[2, 1e300]]):
        rewards.append(1, prompts)
    assert (len(rewards), rewards.first, rewards.last) == (0, 0, 0)
    assert rewards.map("mean", 0, 0, 0, 0, 10, 10).counts.sum() == 0
    rewards.append(7, [[3, 0.5, 0.0], [3, None, None], [4, 1]])
    assert (len(rewards), rewards.first, rewards.last) == (2, 7, 7)


def test_too_many_entries_keep_evenly_spaced_steps_and_the_first_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = drawn(200, 50, 8)
    monkeypatch.setattr(prompt_rewards, "_MOST_ENTRIES", 500)
    monkeypatch.setattr(prompt_rewards, "_MOST_PROMPTS", 40)
    thinned = gathered(entries)
    kept = [entry for entry in entries if (entry[0] - 1) % 4 == 0]
    first = list(dict.fromkeys(row for step, row, _ in entries if step < 200))
    assert 40 <= len(thinned) <= 47 and set(thinned.ordered("row").tolist()) <= set(first)
    rows = set(thinned.ordered("row").tolist())
    expected = sum(row in rows for _, row, _ in kept)
    found = thinned.map("row", 0, len(thinned), 1, 200, 400, 400).counts.sum()
    assert (thinned.first, thinned.last) == (1, 197) and abs(int(found) - expected) <= 8
