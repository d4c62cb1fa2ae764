"""Agents: what an endpoint out of the decode loop costs, and what it withstands.

    python benchmarks/agents.py learn [--steps 100]     the look-up task by tools and by an agent, seed 1, in turns
    python benchmarks/agents.py storm [--rollouts 3]    256 episodes at once whose clients misbehave

`learn` trains the same model twice, by the run's own tools and by `training_scripts/lookup_agent.py` with an unchanged
client of openai, and prints minutes and held-out accuracy.

In `storm` every episode takes 1 to 8 turns, sends bodies that are no requests (100,000 of them in all), leaves turns
before they end, reads slowly, and in one case of eight raises. Afterwards the process has as many files and threads as
before the first rollout, every page is free (the decoder asserts it), and nothing is answered any more.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from machine import parser_of, save

ROOT = Path(__file__).parent.parent
EPISODES, MALFORMED = 256, 100_000


async def storms(task: dict[str, Any], client: Any) -> float:
    """An episode of a storm."""
    draw, url = random.Random(), str(client.base_url)
    for _ in range(task["malformed"]):
        body = draw.choice([b"", b"{", b"[[", b"null", b'{"messages": 3}', b'{"messages": [{}]}', draw.randbytes(64)])
        reply = await client._client.post(f"{url}chat/completions", content=body, headers=client.auth_headers)
        assert reply.status_code == 400, reply.text
    chat = [{"role": "user", "content": "a" * draw.randrange(20)}]
    for _ in range(draw.randint(1, 8)):
        asked = asyncio.ensure_future(client.chat.completions.create(model="policy", messages=chat))
        if draw.random() < 0.2:
            await asyncio.wait([asked], timeout=draw.random() / 20)
            asked.cancel()
            continue
        reply = await asked
        await asyncio.sleep(draw.random() / 20 if draw.random() < 0.2 else 0)
        said = {"role": "assistant", "content": reply.choices[0].message.content}
        chat = [*chat, said, {"role": "user", "content": "b"}] if draw.random() < 0.8 else chat[:1]
    if draw.random() < 1 / 8:
        raise ValueError("no luck")
    return 1.0


def storm(rollouts: int) -> dict[str, Any]:
    """Rollouts of `storms` with a tiny model."""
    sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/turns")]
    import httpx
    from test_agents import agents_of, model_of, sampled

    turns, tokenizer, rollout = agents_of(__file__ + ":storms", max_slots=64, max_turns=500, agent_timeout_s=600)
    model, found = model_of("llama", tokenizer), []
    for number in range(rollouts):
        rows = [{"prompt": "go", "malformed": MALFORMED // EPISODES if number == 0 else 4}] * EPISODES
        begin_s = time.perf_counter()
        completions, _ = sampled((turns, tokenizer, rollout), model, rows, size=1, seed=number)
        failed = sum(completion.episode.failure is not None for completion in completions)
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        found.append({"seconds": time.perf_counter() - begin_s, "failed": failed, "files": files, "threads": threads})
        print(json.dumps(found[-1]), flush=True)
    closed = httpx.get(f"{turns._endpoint.url}/v1/models").status_code
    return {"rollouts": found, "status afterwards": closed}


def learn(steps: int) -> dict[str, Any]:
    """The look-up task by tools and by an agent."""
    scripts, found = ROOT / "training_scripts", {}
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task"
        subprocess.run([sys.executable, scripts / "lookup_task.py", task, "--seed", "1"], check=True)
        base = ["--run.dir", folder, "--run.seed", "1", "--log.wandb", "disabled"]
        rows = ["--data.path", task / "train.jsonl", "--data.eval_path", task / "heldout.jsonl"]
        warm = ["sft", "--config", scripts / "lookup_sft.yaml", "--policy.model", task / "model"]
        main = [sys.executable, "-m", "hybrid_grpo"]
        subprocess.run([*main, *warm, "--data.path", task / "sft.jsonl", *base], check=True, capture_output=True)
        agent = ["--rollout.tools", "[]", "--rollout.agent", f"{scripts / 'lookup_agent.py'}:lookup"]
        for name, more in {"tools": [], "agent": agent}.items():
            train = ["train", "--config", scripts / "lookup.yaml", "--policy.model", f"{folder}/lookup-sft/model"]
            train += ["--run.name", name, "--run.steps", str(steps), *rows, *base, *more]
            subprocess.run([*main, *train], check=True, capture_output=True, cwd=ROOT)
            lines = [json.loads(line) for line in (Path(folder) / name / "metrics.jsonl").read_text().splitlines()]
            accuracy = [line["eval/heldout/accuracy"] for line in lines if "eval/heldout/accuracy" in line]
            seconds = sum(line.get("time/step_s", 0.0) for line in lines)
            again = max(line.get("agent/read_again_frac", 0.0) for line in lines)
            found[name] = {"seconds of steps": seconds, "accuracy": accuracy, "most read again": again}
            print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=["learn", "storm"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rollouts", type=int, default=3)
    arguments = parser.parse_args()
    found = learn(arguments.steps) if arguments.what == "learn" else storm(arguments.rollouts)
    save(arguments.json, found)


if __name__ == "__main__":
    main()
