"""Bad tools must not harm a run: 200 steps on two ranks with a tool that fails in every way.

    python benchmarks/chaos_tools.py [--environment] [--steps 200] [--json FILE]

What a call does is decided by the key that the model asks for: it raises (10 % of the keys), ends its process (3 %),
hangs for ever (2 %), answers after its timeout of 3 s (2 %), returns 1 MB (9 %) or bytes that are not text (8 %), or
answers. It first records what it is about to do, which `injected` counts. `calls` and `failed` come from the metrics
and must equal the injected numbers, `expected_failed` of them failures. `wrong_answers` counts tool messages that the
model read and that do not fit the key. `processes_left` and `shared_memory_left` count what a finished run has left.
The model is random, with a bias towards calls. Ends with status 1 if a number is not as expected.

With `--environment`, the steps of an environment fail as the text of the turn says. `calls` then counts its resets, and
a failure is a failed completion; `wrong_failures` counts completions that failed without a failed step, or continued
after one.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 3.0
FATES = {"raise": 26, "exit": 34, "hang": 38, "late": 44, "long": 68, "bytes": 88, "answer": 256}
"""What a call does, with an exclusive upper bound on the first byte of its key's hash."""
TOOL = "tool/look_up/calls", "tool/look_up/failed_frac"
FAILURES = ("raise", "exit", "hang", "late")


def fate(key: str) -> str:
    """What a call with this key does."""
    number = hashlib.md5(f"bad{key}".encode(errors="replace")).digest()[0]
    return next(name for name, below in FATES.items() if number < below)


def look_up(key: str) -> str:
    """
    Look a key up.

    Args:
        key: the key.
    """
    return act(key)


class Sick:
    """An environment whose steps go wrong."""

    def reset(self, **columns: Any) -> None:
        """Begin."""
        note("reset")

    def step(self, text: str) -> tuple[str, float, bool]:
        """Answer a turn, which earns 1."""
        return act(text), 1.0, False


def note(what: str) -> None:
    """Record what is about to happen."""
    with open(os.environ["CHAOS_LOG"], "a") as log:
        log.write(f"{what}\n")


def act(key: str) -> str:
    """Do what this key makes happen."""
    what = fate(key)
    note(what)
    if what == "raise":
        raise ValueError("no")
    if what == "exit":
        os._exit(7)
    if what in ("hang", "late"):
        time.sleep(2 * TIMEOUT_S if what == "late" else 10**6)
    if what == "long":
        return "x" * 1_000_000
    if what == "bytes":
        return bytes(range(256))  # type: ignore[return-value]
    return answer(key)


def answer(key: str) -> str:
    """The answer, if nothing goes wrong."""
    return "".join(letter for letter in key if letter.islower())[:2]


def bias(model: Path, parts: dict[str, float]) -> str:
    """Added to the logits of the tokens with these parts."""
    ids = {
        token["content"]: token["id"] for token in json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    }
    return json.dumps({str(next(i for text, i in ids.items() if part in text)): by for part, by in parts.items()})


def train(folder: Path, steps: int, *, with_environment: bool) -> None:
    """The run."""
    environment = {**os.environ, "CHAOS_LOG": str(folder / "injected"), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    task = folder / "task"
    subprocess.run([sys.executable, ROOT / "training_scripts/lookup_task.py", task], check=True, env=environment)
    settings = {
        "run.dir": folder,
        "run.steps": steps,
        "policy.model": task / "model",
        "policy.lr": "1e-9",
        "data.path": task / "train.jsonl",
        "rollout.prompts_per_step": 8,
        "rollout.num_generations": 4,
        "rollout.max_completion_tokens": 40,
        "rollout.max_turns": 3,
        "rollout.max_tool_tokens": 36,
        "rollout.tool_timeout_s": TIMEOUT_S,
        "eval.every": 0,
        "log.wandb": "disabled",
        "log.rollouts_every": 1,
    }
    ends = {"<|im_end|>": 3.0}
    if with_environment:
        settings |= {"rollout.environment": f"{__file__}:Sick", "rollout.tools": "[]", "rewards": "[]"}
        settings |= {"rollout.logit_bias": bias(task / "model", ends), "scoring.max_failed_frac": 1.0}
        settings |= {"rollout.max_tool_tokens": 24}  # every turn is answered: more would not fit into the model
    else:
        calls = {'"look_up"': 4.0, "</tool_call>": 4.0, **ends}
        settings |= {"rollout.tools": json.dumps([f"{__file__}:look_up"])}
        settings |= {"rollout.logit_bias": bias(task / "model", calls)}
    launcher = [Path(sys.executable).with_name("deepspeed"), "--num_accelerators", 2, "--no_local_rank", "--module"]
    recipe = ["--config", ROOT / "training_scripts/lookup.yaml"]
    arguments = [part for setting, value in settings.items() for part in (f"--{setting}", value)]
    command = [*launcher, "hybrid_grpo", "train", *recipe, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])


def left(folder: Path) -> list[str]:
    """Command lines of the run's processes that are still there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"CHAOS_LOG={folder}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # it has ended, or belongs to another user
    return found


def fits(key: str, content: str) -> bool:
    """Whether the model may have read this for a call. The calls of a turn share the length limit of its answer, so the
    text may be cut anywhere."""
    what = fate(key)
    if what in FAILURES:
        return content[:5] == "error"[: len(content)]
    if what == "long":
        return set(content) <= {"x"}
    return answer(key).startswith(content) if what == "answer" else not content.startswith("error")


def rollouts(run: Path) -> Iterator[dict[str, Any]]:
    """All completions of a run."""
    for file in sorted(run.glob("rollouts/step_*.jsonl")):
        yield from map(json.loads, file.read_text().splitlines())


def answers(messages: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Keys, and what the model read for them."""
    for place, message in enumerate(messages):
        after = messages[place + 1 :]
        calls = [call["function"]["arguments"]["key"] for call in message.get("tool_calls", ())]
        read = itertools.takewhile(lambda m: m["role"] == "tool", after)
        yield from zip(calls, (m["content"] for m in read), strict=False)
        if message["role"] == "assistant" and after and after[0]["role"] == "user":
            yield message["content"], after[0]["content"]


def ends_well(completion: dict[str, Any]) -> bool:
    """Whether a completion failed exactly at a turn that must fail."""
    fails = [
        fate(message["content"]) in FAILURES for message in completion["messages"] if message["role"] == "assistant"
    ]
    return not any(fails[:-1]) and (fails[-1] or not completion["failed"])


def measure(folder: Path, steps: int, *, with_environment: bool) -> dict[str, Any]:
    """Counts of a run, and what it has left."""
    shared = set(os.listdir("/dev/shm"))
    start = time.perf_counter()
    train(folder, steps, with_environment=with_environment)
    wall_s = time.perf_counter() - start
    until = time.monotonic() + 10
    while (processes := left(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    injected = Counter((folder / "injected").read_text().split())
    resets = injected.pop("reset", 0)
    rows = [json.loads(line) for line in (folder / "lookup/metrics.jsonl").read_text().splitlines()]
    calls, failed = ("environment/resets", "environment/failed_frac") if with_environment else TOOL
    completions = list(rollouts(folder / "lookup"))
    found = {
        "steps": rows[-1]["step"],
        "injected": dict(sorted(injected.items())),
        "calls": round(sum(row[calls] for row in rows)),
        "expected_calls": resets if with_environment else injected.total(),
        "failed": round(sum(row[calls] * row.get(failed, 0) for row in rows)),
        "expected_failed": sum(injected[name] for name in FAILURES),
        "wrong_answers": [one for c in completions for one in answers(c["messages"]) if not fits(*one)],
        "processes_left": processes,
        "shared_memory_left": sorted(set(os.listdir("/dev/shm")) - shared),
        "wall_s": wall_s,
    }
    if with_environment:
        found["wrong_failures"] = [c["messages"] for c in completions if not ends_well(c)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", action="store_true", help="with an environment instead of a tool")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), given.steps, with_environment=given.environment)
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    kept = found["steps"] == given.steps and set(FATES) == set(found["injected"])
    kept = kept and all(found[name.removeprefix("expected_")] == found[name] for name in found if "expected" in name)
    sys.exit(not kept or any(found[name] for name in found if name.startswith("wrong") or name.endswith("left")))


if __name__ == "__main__":
    main()
