"""How long training waits for a checkpoint that is written meanwhile, and for one that is written at once.

    python benchmarks/saving.py [--ranks 1 2] [--pairs 4] [--json benchmarks/results/saving.json]

A model of 0.2 billion weights trains at ZeRO-3 in float32. After every step a checkpoint is written, in turn while
training waits and while it goes on. Seconds are medians on rank 0:

    synchronous_s   the call that saves, where training waits
    call_s          the call that saves, where training goes on
    settle_s        how long the next change of the weights then waits, until they are copied
    finish_s        how long the main thread waits for the thread later on
    waits_s, ratio  the sum of these three, and its share of `synchronous_s`
    writing_s       what the thread takes
    step_s          a step while nothing is written; `beside_s` the step after a save that goes on

Memory is the resident memory of rank 0 in GB: `before` a save, its `peak` in the step beside it, and `after`.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "training_scripts")]

SIZES = {
    **{"model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 14},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32_768, "tie_word_embeddings": True},
}
SETTINGS = {
    "policy.dtype": "float32",
    "engine.zero_stage": 3,
    "engine.adam": "torch",
    "rollout.prompts_per_step": 2,
    "rollout.num_generations": 2,
    "rollout.max_completion_tokens": 12,
    "rollout.ignore_eos": True,
    "rewards": "[{function: letters_in_place}]",
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "log.wandb": "disabled",
}


def make(folder: Path) -> None:
    """Model and data."""
    import torch
    from quickstart_task import make_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tokenizer, sizes = make_tokenizer(), dict(SIZES)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes, **ids, max_position_embeddings=4096)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": letter * 16, "answer": "a"} for letter in "abcdefghijklmnop"]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Clock:
    """Seconds by name and step, on this rank."""

    def __init__(self) -> None:
        self.seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.step = 0

    def watch(self, owner: Any, function: str, name: str) -> None:
        original = getattr(owner, function)

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*arguments, **options)
            finally:
                self.seconds[self.step][name] += time.perf_counter() - start

        setattr(owner, function, timed)


def work(arguments: list[str]) -> None:
    """One rank of the run: saves go on beside training at every second time."""
    import psutil

    from hybrid_grpo.__main__ import entry
    from hybrid_grpo.model import tensor_files
    from hybrid_grpo.run.saving.checkpoint import Checkpoints
    from hybrid_grpo.run.saving.saver import Saver
    from hybrid_grpo.trainer import Trainer

    clock = Clock()
    memory: dict[int, dict[str, float]] = defaultdict(dict)
    clock.watch(tensor_files, "settle", "settle")
    clock.watch(Trainer, "step", "step")
    save, finish, finish_writing, step_of = Saver.save, Saver.finish, Checkpoints.finish, Trainer.step
    threads: list[float] = []

    def resident() -> float:
        # Of the rank: its parent, which watches it, has read this file.
        return psutil.Process().memory_info().rss / 1e9

    def watch_memory(step: int) -> None:
        while clock.step == step:
            memory[step]["peak"] = max(memory[step].get("peak", 0.0), resident())
            time.sleep(0.05)

    def stepped(self: Trainer, step: int) -> None:
        clock.step = step
        threading.Thread(target=watch_memory, args=(step,), daemon=True).start()
        step_of(self, step)

    def saved(self: Saver, stage: Any, step: int, states: Any, *, beside: bool = False) -> None:
        self.finish(stage)
        memory[step]["before"] = resident()
        start = time.perf_counter()
        save(self, stage, step, states, beside=beside and step % 2 == 0)
        clock.seconds[step]["save"] = time.perf_counter() - start
        memory[step]["after"] = resident()

    def finished(self: Saver, stage: Any) -> None:
        if self._under_way is not None:
            start = time.perf_counter()
            finish(self, stage)
            clock.seconds[clock.step].update(finish=time.perf_counter() - start, writing=threads[-1])

    def written(self: Checkpoints) -> float:
        threads.append(finish_writing(self))
        return threads[-1]

    Saver.save, Saver.finish, Trainer.step = saved, finished, stepped  # type: ignore[method-assign]
    Checkpoints.finish = written  # type: ignore[method-assign]
    sys.argv = ["hybrid-grpo", *arguments]
    target = Path(os.environ["SEEN"])
    exit_ = os._exit

    def leave(status: int) -> None:
        # The rank's parent, which watches it, has seen nothing.
        if os.environ.get("RANK", "0") == "0" and clock.seconds:
            target.write_text(json.dumps({"seconds": clock.seconds, "memory": memory}))
        exit_(status)

    os._exit = leave  # type: ignore[assignment]
    entry()


def measure(folder: Path, ranks: int, pairs: int) -> dict[str, Any]:
    """A run of `ranks` ranks with as many saves of each kind."""
    from forks import run

    settings = {
        **SETTINGS,
        **{"policy.model": folder / "model", "data.path": folder / "train.jsonl", "run.dir": folder / f"runs_{ranks}"},
        "run.steps": 2 * pairs + 2,
    }
    seen = folder / f"seen_{ranks}.json"
    line = ["train", *(part for name, value in settings.items() for part in (f"--{name}", str(value)))]
    environment = {"SEEN": str(seen), "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    done = run(__file__, "work", *line, world=ranks, environment=environment, timeout=3000)
    assert done.status == 0, (done.out + done.err)[-3000:]
    found = json.loads(seen.read_text())
    return summary(found["seconds"], found["memory"])


def summary(seconds: dict[str, dict[str, float]], memory: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Medians. The first save is of smaller states, the last is waited for; both are left out."""
    steps = range(1, max(map(int, seconds)) - 1)
    waited, beside = ([step for step in steps if step % 2 == rest] for rest in (1, 0))

    def median(name: str, chosen: list[int]) -> float:
        return round(statistics.median(seconds[str(step)].get(name, 0.0) for step in chosen), 3)

    after = [step + 1 for step in beside]
    result = {
        "synchronous_s": median("save", waited),
        "call_s": median("save", beside),
        "settle_s": median("settle", after),
        "finish_s": median("finish", after),
        "writing_s": median("writing", after),
        "step_s": median("step", [step + 1 for step in waited]),
        "beside_s": median("step", after),
        "saves": len(beside),
    }
    result["waits_s"] = round(sum(result[name] for name in ("call_s", "settle_s", "finish_s")), 3)
    result["ratio"] = round(result["waits_s"] / result["synchronous_s"], 3)
    result["memory"] = {
        name: round(statistics.median(memory[str(step)][of] for step in chosen), 2)
        for name, of, chosen in (
            ("before", "before", beside),
            ("peak beside", "peak", after),
            ("peak alone", "peak", [step + 1 for step in waited]),
            ("before the next", "before", after),
        )
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    packages = ("torch", "deepspeed", "transformers")
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}, "
        + ", ".join(f"{package} {version(package)}" for package in packages)
    }
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        for ranks in options.ranks:
            result[f"{ranks} ranks"] = measure(Path(folder), ranks, options.pairs)
            print(json.dumps({f"{ranks} ranks": result[f"{ranks} ranks"]}), flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2:])
    else:
        main()
