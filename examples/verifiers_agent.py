"""An agent that plays environments of verifiers 0.4 as they are: tasks, programs and rewards are theirs.

    pip install 'verifiers>=0.4,<0.5' uv
    python examples/verifiers_agent.py MODEL '{"taskset": {"id": "textarena", "game": "Wordle-v0"}}' 256 > tasks.jsonl
    hybrid-grpo train --policy.model MODEL --data.path tasks.jsonl --rollout.agent examples/verifiers_agent.py:play ...

The JSON is what `--env` has on their command line, the number how many of the tasks become rows. MODEL is a folder or
a hub name, whose chat template their renderer reads. The policy is asked from tokens to tokens.
"""

import asyncio
import itertools
import json
import os
import sys
from contextlib import AsyncExitStack

from verifiers.v1.clients import ModelContext, TrainClientConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

served = AsyncExitStack()
environments = {}


async def serve(config):
    """Start what an environment serves, which stays until the process ends."""
    env = load_environment(resolve_env_config(json.loads(config)))
    await served.enter_async_context(env.serving())
    return env, iter(env.taskset), []


async def play(task, client):
    """Run an episode; its reward is the sum of its trainable agents' rewards."""
    if task["env"] not in environments:
        environments[task["env"]] = asyncio.ensure_future(serve(task["env"]))
    env, rest, read = await environments[task["env"]]
    read += itertools.islice(rest, max(0, task["index"] + 1 - len(read)))
    variable = f"EPISODE_{id(client)}"
    os.environ[variable] = client.api_key
    url = str(client.base_url).removesuffix("/")
    config = TrainClientConfig(base_url=url, api_key_var=variable, renderer_model_name=task["model"])
    episode = await env.run_episode(read[task["index"]], ModelContext("policy", config))
    if not episode.ok:
        raise RuntimeError(
            [error.message for error in [*episode.errors, *(e for t in episode.traces for e in t.errors)]]
        )
    return sum(trace.reward for trace in episode.traces if trace.agent.trainable)


def main(model, config, count):
    """Write a row for each task."""
    taskset = load_environment(resolve_env_config(json.loads(config))).taskset
    for index, task in enumerate(itertools.islice(taskset, int(count))):
        print(json.dumps({"prompt": task.data.prompt_text, "env": config, "index": index, "model": model}))


if __name__ == "__main__":
    main(*sys.argv[1:])
