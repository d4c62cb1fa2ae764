"""Tasks of reasoning-gym (arXiv:2505.24760), `gym/NAME`: problems of its generators, which check answers."""

from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from typing import Any

from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.config.tasks import Row, TaskRecipe, ready_made_settings, with_options
from hybrid_grpo.data.tasks.puzzles import is_held_out

_PROBLEMS = 20_000
"""Problems of a generator. Some generators draw all of them at once."""


@cache
def gym_task(name: str) -> TaskRecipe:
    """Return the task `gym/NAME` or, with options of the generator, `gym/NAME,max_terms=2,...`. Raises UserError if
    reasoning-gym is not installed, or has no such generator or option."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise UserError(f"data.task {name} needs reasoning-gym: pip install 'hybrid_grpo[gym]' ({error})") from error
    generator, given = with_options(name)
    generators = sorted(DATASETS.keys() - {"composite"})
    why = f"reasoning-gym has no generator {generator}: {did_you_mean(generator, generators)}"
    refuse(generator not in generators, f"data.task {name}: {why}")
    known = [each.name for each in fields(DATASETS[generator][1]) if each.name not in ("seed", "size")]
    for option in given:
        why = f"{generator} has no option {option}: {did_you_mean(option, known)}"
        refuse(option not in known, f"data.task {name}: {why}")
    try:
        problems = create_dataset(generator, seed=0, size=_PROBLEMS, **given)
    except (AssertionError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"data.task {name}: {generator} refuses these options: {why}") from error

    def made(held_out: bool) -> Iterator[Row]:
        seen = set[str]()
        for index in range(_PROBLEMS):
            question = (problem := problems[index])["question"]
            if is_held_out(question) == held_out and question not in seen:
                seen.add(question)
                yield {"generator": generator, **problem}

    return TaskRecipe(gym, ready_made_settings("gym"), made)


def gym(row: Row) -> Row:
    """Return a problem's question as the prompt; `problem` is the problem as Python text, by which it is checked."""
    problem = {name: row[name] for name in ("question", "answer", "metadata")}
    return {"prompt": row["question"], "problem": repr(_plain(problem)), "metadata": None}


def _plain(value: Any) -> Any:
    """Return a value with plain strings in place of numpy's."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return str(value) if isinstance(value, str) else value
