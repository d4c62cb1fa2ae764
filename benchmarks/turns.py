"""Turns: how much of the waiting for tools is hidden, and whether a model learns to use a tool that it needs.

    python benchmarks/turns.py [--task lookup] [--seeds 0,1,2] [--json FILE]

`hidden_frac`: 64 conversations of 4 turns, each answered by a tool of 100 ms, with slots for 24 of them. Decoding is
timed with and without the 100 ms, alternately; the hidden fraction is the share of the tools' total waiting time that
does not lengthen the conversations. A single conversation cannot hide its own waiting, so the number of tokens of a
turn is chosen such that decoding takes as long as waiting.

`slow_tool_delay_s`: how much later the other 63 conversations end if one tool takes 5 s.

For each seed: the task of training_scripts/lookup_task.py, warmed up on supervised pairs and trained with
training_scripts/lookup.yaml on one rank; `--task search` and `--task calculator` use the files of that name. Accuracy
is that of completions sampled at temperature 1 for held-out keys; seconds are those of the whole `train` command,
including its start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen2Config

from hybrid_grpo.data.batch import Completion
from hybrid_grpo.generation import Request, Sampling, generate, stream_key
from hybrid_grpo.model.attention import ATTENTION

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "training_scripts"
CONVERSATIONS, TURNS, TOOL_S, SLOW_S, SLOTS = 64, 4, 0.1, 5.0, 24
TURN_TOKENS, GIVEN = 24, [5] * 12


class Timed:
    """Answers every turn after a delay, like an asynchronous tool; `seconds` has the delays by key."""

    def __init__(self, seconds: Any) -> None:
        self._seconds, self._turns, self.ended_at = seconds, dict[int, int](), dict[int, float]()
        self._loop, self._ready, self._news = asyncio.new_event_loop(), list[int](), threading.Condition()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def begin(self, requests: Any) -> None:
        self._start_s = time.perf_counter()

    def ended(self, key: int, turn_ids: list[int], room: int) -> str | None:
        self._turns[key] = turn = self._turns.get(key, 0) + 1
        if turn == TURNS:
            return "stop"
        self._loop.call_soon_threadsafe(self._loop.call_later, self._seconds(key, turn), self._answer, key)
        return None

    def _answer(self, key: int) -> None:
        with self._news:
            self._ready.append(key)
            self._news.notify()

    def cut(self, key: int) -> str:
        return "length"

    def answers(self, patience_s: float) -> list[tuple[int, list[int]]]:
        with self._news:
            if patience_s and not self._ready:
                self._news.wait(patience_s)
            ready, self._ready = self._ready, []
        return [(key, GIVEN) for key in ready]

    def finished(self, key: int, completion: Completion) -> Completion:
        self.ended_at[key] = time.perf_counter() - self._start_s
        return completion


def decode(model: Any, seconds: Any) -> Timed:
    """Decode all conversations. A turn has TURN_TOKENS tokens, and only the last may end it."""
    turns = Timed(seconds)
    requests = [Request([1, 2, 3, row % 50], [stream_key(row)], max_total_tokens=1000) for row in range(CONVERSATIONS)]
    sampling = Sampling(TURN_TOKENS * TURNS, stop_strings=("end",))
    generate(
        model,
        requests,
        sampling,
        max_slots=SLOTS,
        turns=turns,  # type: ignore[arg-type]
        decode=lambda ids: "end" if len(ids) % TURN_TOKENS == 0 else "",
    )
    return turns


def latency(hidden: int, layers: int) -> dict[str, float]:
    """The hidden share of the waiting, and the delay that a slow tool causes for others."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    from transformers import Qwen2ForCausalLM

    config._attn_implementation = ATTENTION
    model = Qwen2ForCausalLM(config).eval()
    decode(model, lambda key, turn: 0.0)
    rounds = []
    slow = stream_key(CONVERSATIONS // 2)
    for _ in range(3):
        without = decode(model, lambda key, turn: 0.0)
        with_tool = decode(model, lambda key, turn: TOOL_S)
        late = decode(model, lambda key, turn: SLOW_S if key == slow and turn == 1 else TOOL_S)
        others = max(at for key, at in late.ended_at.items() if key != slow)
        longest, shortest = max(with_tool.ended_at.values()), max(without.ended_at.values())
        waiting = (TURNS - 1) * TOOL_S * CONVERSATIONS / SLOTS
        rounds.append((1 - (longest - shortest) / waiting, others - longest, shortest, longest, waiting))
    names = ("hidden_frac", "slow_tool_delay_s", "decoding_s", "with_tools_s", "waiting_s")
    return {name: median(column) for name, column in zip(names, zip(*rounds, strict=True), strict=True)}


def run(*arguments: str | Path, python: str | Path = sys.executable) -> str:
    """The output of a Python command on one rank; it is shown if the command fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "WANDB_MODE": "disabled"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [str(python), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def learn(kind: str, seed: int) -> dict[str, Any]:
    """A run of a task."""
    with tempfile.TemporaryDirectory() as place:
        task, shared = Path(place, "task"), ["--run.dir", place, "--run.seed", str(seed), "--log.wandb", "disabled"]
        run(SCRIPTS / f"{kind}_task.py", task, "--seed", str(seed))
        sft = ["sft", "--config", SCRIPTS / f"{kind}_sft.yaml", "--policy.model", task / "model", *shared]
        run("-m", "hybrid_grpo", *sft, "--data.path", task / "sft.jsonl")
        recipe = Path(place, "recipe.yaml")
        recipe.write_text((SCRIPTS / f"{kind}.yaml").read_text().replace(f"runs/{kind}-task", str(task)))
        train = ["train", "--config", recipe, "--policy.model", Path(place, f"{kind}-sft/model")]
        train += [*shared, "--data.path", task / "train.jsonl", "--data.eval_path", task / "heldout.jsonl"]
        start = time.perf_counter()
        run("-m", "hybrid_grpo", *train)
        wall_s = time.perf_counter() - start
        lines = [json.loads(line) for line in Path(place, kind, "metrics.jsonl").read_text().splitlines()]
    accuracy = [line["eval/heldout/accuracy"] for line in lines if "eval/heldout/accuracy" in line]
    return {
        "accuracy_first": accuracy[0],
        "accuracy_last": accuracy[-1],
        "accuracy": accuracy,
        "wall_s": wall_s,
        "turns_first": lines[1]["turns/mean"],
        "turns_last": lines[-1]["turns/mean"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("lookup", "search", "calculator", "guess"), default="lookup")
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas; empty for the latency alone")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = latency(given.hidden, given.layers)
    print(json.dumps(result), flush=True)
    result["seeds"] = {}
    for seed in filter(None, given.seeds.split(",")):
        result["seeds"][seed] = learn(given.task, int(seed))
        print(f"seed {seed}", json.dumps(result["seeds"][seed]), flush=True)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
