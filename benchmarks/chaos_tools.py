"""What bad tools cannot do to a run: 200 steps on two ranks with a tool that goes wrong in every way.

    python benchmarks/chaos_tools.py [--steps 200] [--json FILE]

What a call does is decided by the key that the model asks for: it raises (10 %), ends its process (3 %), hangs for
ever (1 %), answers after its time-out of 3 s (1 %), returns 1 MB (9 %) or bytes that are no text (8 %), or answers.
It writes down what it is about to do; `injected` counts that. `calls` and `failed` are those of the metrics, and have
to be the injected ones, with `expected_failed` of them failures. `wrong_answers` are messages of the tool that the
model read and that do not fit the key. `processes_left` and `shared_memory_left` are what a finished run has left
behind. The model is random, with a bias towards calls. Ends with status 1 where a number is not as it has to be.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 3.0
FATES = {"raise": 26, "exit": 34, "hang": 36, "late": 38, "long": 62, "bytes": 82, "answer": 256}
"""What a call does, and the number below which the first byte of its key's hash is."""
FAILURES = ("raise", "exit", "hang", "late")


def fate(key: str) -> str:
    """What a call with this key does."""
    number = hashlib.md5(f"sick{key}".encode(errors="replace")).digest()[0]
    return next(name for name, below in FATES.items() if number < below)


def look_up(key: str) -> str:
    """
    Look a key up.

    Args:
        key: the key.
    """
    what = fate(key)
    with open(os.environ["CHAOS_LOG"], "a") as log:
        log.write(f"{what}\n")
    if what == "raise":
        raise ValueError("no")
    if what == "exit":
        os._exit(7)
    if what in ("hang", "late"):
        time.sleep(TIMEOUT_S + 1 if what == "late" else 10**6)
    if what == "long":
        return "x" * 1_000_000
    if what == "bytes":
        return bytes(range(256))  # type: ignore[return-value]
    return answer(key)


def answer(key: str) -> str:
    """What is found, where nothing goes wrong."""
    return "".join(letter for letter in key if letter.islower())[:2]


def bias(model: Path) -> str:
    """Added to the logits: for the tokens that begin, finish and end a call."""
    ids = {
        token["content"]: token["id"] for token in json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    }
    parts = {'"look_up"': 4.0, "</tool_call>": 4.0, "<|im_end|>": 3.0}
    return json.dumps({str(next(i for text, i in ids.items() if part in text)): by for part, by in parts.items()})


def train(folder: Path, steps: int) -> None:
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
        "rollout.tools": json.dumps([f"{__file__}:look_up"]),
        "rollout.tool_timeout_s": TIMEOUT_S,
        "rollout.logit_bias": bias(task / "model"),
        "eval.every": 0,
        "log.wandb": "disabled",
        "log.rollouts_every": 1,
    }
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
            continue  # it has ended, or is another user's
    return found


def fits(key: str, content: str) -> bool:
    """Whether this can be what the model read of a call, cut to its limit of tokens."""
    what = fate(key)
    if not content:
        return True  # the calls of a turn share the room of its answer, and many leave each none
    if what in FAILURES:
        return content.startswith("error")
    if what == "long":
        return set(content) == {"x"}
    return content == answer(key) if what == "answer" else not content.startswith("error")


def wrong_answers(run: Path) -> list[tuple[str, str]]:
    """Keys and messages of the tool that are not what their call has done."""
    wrong = []
    for file in sorted(run.glob("rollouts/step_*.jsonl")):
        for line in file.read_text().splitlines():
            messages = json.loads(line)["messages"]
            for place, message in enumerate(messages):
                answers = itertools.takewhile(lambda m: m["role"] == "tool", messages[place + 1 :])
                for call, read in zip(message.get("tool_calls", ()), answers, strict=False):
                    key = call["function"]["arguments"]["key"]
                    if not fits(key, read["content"]):
                        wrong.append((key, read["content"]))
    return wrong


def measure(folder: Path, steps: int) -> dict[str, Any]:
    """Counts of a run, and what is left of it."""
    shared = set(os.listdir("/dev/shm"))
    start = time.perf_counter()
    train(folder, steps)
    wall_s = time.perf_counter() - start
    until = time.monotonic() + 10
    while (processes := left(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    injected = Counter((folder / "injected").read_text().split())
    rows = [json.loads(line) for line in (folder / "lookup/metrics.jsonl").read_text().splitlines()]
    failed = sum(row["tool/look_up/calls"] * row.get("tool/look_up/failed_frac", 0) for row in rows)
    return {
        "steps": rows[-1]["step"],
        "injected": dict(sorted(injected.items())),
        "calls": round(sum(row["tool/look_up/calls"] for row in rows)),
        "expected_calls": injected.total(),
        "failed": round(failed),
        "expected_failed": sum(injected[name] for name in FAILURES),
        "wrong_answers": wrong_answers(folder / "lookup"),
        "processes_left": processes,
        "shared_memory_left": sorted(set(os.listdir("/dev/shm")) - shared),
        "wall_s": wall_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), given.steps)
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    kept = found["steps"] == given.steps and found["calls"] == found["expected_calls"]
    kept = kept and found["failed"] == found["expected_failed"] and set(FATES) == set(found["injected"])
    sys.exit(not (kept and not (found["wrong_answers"] or found["processes_left"] or found["shared_memory_left"])))


if __name__ == "__main__":
    main()
