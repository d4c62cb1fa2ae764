"""Tasksets of verifiers 0.4, `verifiers/ID`: their tasks are rows, and `play` is the agent of these rows."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import cache, reduce
from itertools import islice
from typing import Any

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.tasks import Row, TaskRecipe, ready_made_settings, with_options
from hybrid_grpo.config.user_code import describe
from hybrid_grpo.data.tasks.puzzles import is_held_out

_served = AsyncExitStack()
"""What environments serve, until the process ends."""


@cache
def environment(name: str) -> Any:
    """Return verifiers' environment of the task `verifiers/ID` or `verifiers/ID,option=value,...`. Options are those of
    the taskset; one with a dot is what follows `--env.` on their command line, as `agent.runtime.type=subprocess`.
    Raises UserError if verifiers is not installed, or has no such taskset or option."""
    try:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        why = f"needs verifiers: pip install 'verifiers>=0.4,<0.5' uv ({error})"
        raise UserError(f"data.task {name} {why}") from error
    taskset, options = with_options(name)
    config: dict[str, Any] = {"taskset": {"id": taskset}}
    for option, value in options.items():
        *sections, last = option.split(".") if "." in option else ("taskset", option)
        reduce(lambda section, key: section.setdefault(key, {}), sections, config)[last] = value
    try:
        return load_environment(resolve_env_config(config))
    except Exception as error:
        raise UserError(f"data.task {name}: {describe(error, None)}") from error


def verifiers_task(name: str) -> TaskRecipe:
    """Return the task of a taskset; see `environment`. What a task holds decides whether it is held out."""

    def made(held_out: bool) -> Iterator[Row]:
        for index, task in enumerate(taskset):
            if is_held_out(task.with_data(idx=None).key) == held_out:
                yield {"prompt": task.data.prompt_text, "task": name, "index": index}

    taskset = environment(name).taskset
    return TaskRecipe(dict, ready_made_settings("verifiers"), made)


@cache
def _opened(name: str) -> tuple[asyncio.Future[Any], Iterator[Any], list[Any]]:
    """Start what an environment serves. Return also its tasks that are still to be read, and those that were read."""
    env = environment(name)
    return asyncio.ensure_future(_served.enter_async_context(env.serving())), iter(env.taskset), []


async def play(task: Row, client: Any) -> float:
    """Play an episode, which asks the policy from tokens to tokens; return the sum of its trainable agents' rewards.
    Raises RuntimeError if it failed."""
    from verifiers.v1.clients import ModelContext, TrainClientConfig

    opening, rest, read = _opened(task["task"])
    await opening
    read += islice(rest, max(0, task["index"] + 1 - len(read)))
    [model] = (await client.models.list()).data
    url = str(client.base_url).removesuffix("/")
    config = TrainClientConfig(base_url=url, headers=client.auth_headers, renderer_model_name=model.root)
    episode = await environment(task["task"]).run_episode(read[task["index"]], ModelContext(model.id, config))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(error.message for error in errors))
    return sum(trace.reward for trace in episode.traces if trace.agent.trainable)
