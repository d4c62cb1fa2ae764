"""Runs that are sick on purpose, one for each alarm, and healthy ones: which alarms go off, and when?

    python benchmarks/alarms.py [--only kl,lora] [--seed 0] [--folder FOLDER] [--json FILE]

Every run really trains a tiny model on one rank, with the alarms' default limits. A sick run is healthy until step
ONSET, when one thing goes wrong: the reward function rewards something else, a setting changes, the sampler's weights
differ from those of the training forward, or the machine becomes slow. It ends 20 steps later. It passes if its own
alarm goes off in these steps and no other alarm does at any time. A healthy run passes if no alarm goes off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "training_scripts"
ONSET, STEPS = 12, 20
"""The first sick step, and the number of sick steps."""
HEALTHY_STEPS = 40

Rewards = list[float]


def in_place(text: str, answer: str) -> float:
    """Share of letters in the right place."""
    return sum(a == b for a, b in zip(text, answer, strict=False)) / max(len(text), len(answer), 1)


def right(completions: list[str], answer: list[str], **_: Any) -> Rewards:
    """The task: sorted letters, with a part of the reward for each letter in its place."""
    return [in_place(text, wanted) for text, wanted in zip(completions, answer, strict=True)]


def _sick(reward: Callable[..., Rewards]) -> Callable[..., Rewards]:
    """The task's reward until ONSET, then another one."""

    def changing(completions: list[str], answer: list[str], trainer_state: Any, **columns: Any) -> Rewards:
        call = right if trainer_state.global_step + 1 < ONSET else reward
        return call(completions=completions, answer=answer, **columns)

    changing.__name__ = "changing"
    return changing


def almost_right(completions: list[str], answer: list[str], **_: Any) -> Rewards:
    """The task, but nothing counts as solved."""
    return [0.9 * reward for reward in right(completions=completions, answer=answer)]


def pays_length(completions: list[str], **_: Any) -> Rewards:
    return [len(text) / 64 for text in completions]


def pays_prompts(prompts: list[str], **_: Any) -> Rewards:
    return [len(prompt) / 20 for prompt in prompts]


def pays_everybody(completions: list[str], **_: Any) -> Rewards:
    return [0.5] * len(completions)


def pays_foreign_letters(completions: list[str], answer: list[str], **_: Any) -> Rewards:
    """Letters that the word does not have, in an answer of its length."""
    told = zip(completions, answer, strict=True)
    return [
        sum(letter not in wanted for letter in text) / len(wanted) if len(text) <= len(wanted) else 0.0
        for text, wanted in told
    ]


def descending(text: str, answer: str) -> float:
    """Share of neighbouring letters in the wrong order; 0 if the answer is longer than the word."""
    share = sum(a > b for a, b in itertools.pairwise(text)) / (len(answer) - 1)
    return share if len(text) <= len(answer) else 0.0


def bonus(completions: list[str], answer: list[str], trainer_state: Any, **_: Any) -> Rewards:
    """A second reward function, which rewards the opposite of the task from ONSET on."""
    wrong = pays_foreign_letters(completions=completions, answer=answer)
    return [2.0 * value if trainer_state.global_step + 1 >= ONSET else 0.0 for value in wrong]


def pays_train_only(completions: list[str], answer: list[str], split: list[str], **_: Any) -> Rewards:
    """Held-out words are still scored by the task; on training words the opposite is rewarded, and more highly."""
    rows = zip(completions, answer, split, strict=True)
    return [in_place(text, wanted) if of == "heldout" else 1 + descending(text, wanted) for text, wanted, of in rows]


def raises_for_some(completions: list[str], answer: list[str], **columns: Any) -> Rewards:
    if any(wanted[0] in "ab" for wanted in answer):
        raise ValueError("no answer for this one")
    return right(completions=completions, answer=answer, **columns)


@dataclass(frozen=True)
class Case:
    """A run, sick or healthy."""

    name: str
    rewards: list[Any] = field(default_factory=lambda: [right])
    settings: dict[str, Any] = field(default_factory=dict)
    later: dict[str, Any] = field(default_factory=dict)
    """Settings that change at ONSET: the run is resumed with them."""
    hook: Callable[[], None] | None = None
    """A fault of the machine or the code."""
    model: str = "warm"
    sick: bool = True


def perturb_sampler() -> None:
    """From ONSET on the policy samples with weights that are 5 % off, like rounded or stale ones."""
    import torch

    from hybrid_grpo.policy import Policy

    rollout = Policy.rollout

    def perturbed(self: Policy, *given: Any, **named: Any) -> Any:
        weights = [weight for weight in self.engine.engine.module.parameters() if named["step"] >= ONSET]
        kept = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.mul_(1 + 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
        try:
            return rollout(self, *given, **named)
        finally:
            with torch.no_grad():
                for weight, value in zip(weights, kept, strict=True):
                    weight.copy_(value)

    Policy.rollout = perturbed  # type: ignore[method-assign]


def stuck_weight() -> None:
    """From ONSET on the optimizer's step leaves the first weight of the model as it was."""
    from hybrid_grpo.engine import Engine

    step = Engine.step

    def stuck(self: Engine, lr: float) -> Any:
        weight = next(self.engine.module.parameters())
        kept = weight.detach().clone()
        result = step(self, lr)
        if self.engine.global_steps >= ONSET:
            weight.data.copy_(kept)
        return result

    Engine.step = stuck  # type: ignore[method-assign]


def slow_machine() -> None:
    """From ONSET on every decode step additionally waits for ten times its usual duration."""
    from hybrid_grpo.policy import Policy

    rollout, seconds, looks = Policy.rollout, [0.0], [0]

    def slowed(self: Policy, *given: Any, **named: Any) -> Any:
        step, look = named["step"], named["on_step"]

        def wait() -> None:
            look()
            looks[0] += step < ONSET
            if step >= ONSET:
                time.sleep(10 * seconds[0] / looks[0])

        start = time.perf_counter()
        found = rollout(self, *given, **{**named, "on_step": wait})
        seconds[0] += time.perf_counter() - start if step < ONSET else 0.0
        return found

    Policy.rollout = slowed  # type: ignore[method-assign]


CASES = [
    Case("entropy_collapse", [almost_right], later={"rollout": {"temperature": 0.01}}),
    Case("length_runaway", [_sick(pays_length)], {"rollout": {"max_completion_tokens": 64}}, {"policy": {"lr": 1e-3}}),
    Case("truncated", later={"rollout": {"max_completion_tokens": 3}}),
    Case("dead_groups", [_sick(pays_prompts)]),
    Case("constant_reward", [_sick(pays_everybody)]),
    Case("reward_hacking", [right, bonus], later={"policy": {"lr": 1e-3}}),
    Case("held_out", [_sick(pays_train_only)], later={"policy": {"lr": 1e-3}}),
    Case("kl", [_sick(pays_foreign_letters)], {"grpo": {"beta": 1e-4}}, {"policy": {"lr": 1e-3}}),
    Case(
        "ratio",
        settings={"rollout": {"max_completion_tokens": 4}},
        later={"grpo": {"num_iterations": 4}, "policy": {"lr": 5e-3}},
    ),
    Case("parity", hook=perturb_sampler),
    Case("duplicates", [right], later={"rollout": {"top_p": 0.02}}, model="cold"),
    # Tensors are looked at after the first step of a resumed run.
    Case("frozen_tensors", hook=stuck_weight, later={"run": {"allow_changes": True}}),
    Case("throughput_drop", hook=slow_machine),
    Case("failing_rewards", [_sick(raises_for_some)]),
    Case("quickstart", sick=False),
    Case("tools", sick=False),
    Case("critic", settings={"critic": {"enabled": True}}, sick=False),
    Case("lora", settings={"lora": {"rank": 8}, "policy": {"lr": 5e-4}}, sick=False),
    Case("guests", sick=False),
    Case("curriculum", settings={"curriculum": {"sampling": "difficulty"}}, sick=False),
]


def play(name: str, phase: str, folder: Path, seed: int) -> None:
    """A run, or its part before or after ONSET, in a process of its own."""
    import hybrid_grpo as hg
    from hybrid_grpo.config.recipes import overlay

    sys.stdout = (folder / f"{name}.log").open("a")
    os.dup2(sys.stdout.fileno(), 2)
    case = next(case for case in CASES if case.name == name)
    steps = ONSET + STEPS - 1 if case.sick else HEALTHY_STEPS
    lookup = name == "tools"
    shared = {
        "run": {"dir": str(folder), "name": name, "seed": seed, "steps": ONSET - 1 if phase == "before" else steps},
        "policy": {"dtype": "float32", "lr": 1e-4, "warmup_steps": 5, "betas": [0.9, 0.99]},
        "rollout": {"prompts_per_step": 16, "num_generations": 8, "max_completion_tokens": 8},
        "data": {"path": str(folder / "train.jsonl"), "limit": 512},
        "eval": {"threshold": 1.0},
        "log": {"trackers": [], "rollouts_every": 0},
        "checkpoint": {"every_minutes": 0, "every": ONSET - 1 if case.later else 0},
        # Without shards, since the run with other weights in its sampler writes into them.
        "engine": {"adam": "torch", "zero_stage": 0},
    }
    if not case.sick or name == "held_out":
        shared["data"]["eval_path"], shared["eval"]["every"] = str(folder / "heldout.jsonl"), 4 if case.sick else 20
    shared["policy"]["model"] = str(folder / case.model)
    settings = overlay(shared, case.settings)
    rewards: Any = [{"function": reward, "isolation": "none"} for reward in case.rewards]
    if phase == "after":
        settings = overlay(overlay(settings, {"run": {"resume": "auto", "allow_changes": True}}), case.later)
    if name == "guests":
        guest = {"name": "answers", "path": str(folder / "answers.jsonl"), "weight": "baseline"}
        settings["guests"] = {"writers": [guest]}
    if lookup:
        os.chdir(ROOT)
        of_task = {split: str(folder / f"lookup-{split}.jsonl") for split in ("train", "heldout")}
        settings["data"] = {"path": of_task["train"], "eval_path": of_task["heldout"]}
        settings["policy"]["model"] = str(folder / "lookup")
        tools = {"tools": ["training_scripts/lookup_tools.py:look_up"], "max_turns": 3, "max_tool_tokens": 16}
        settings["rollout"] |= {"max_completion_tokens": 16, **tools}
        settings["eval"]["temperature"], rewards = 1.0, ["exact_match"]
    if case.hook:
        case.hook()
    hg.train(rewards=rewards, **settings)


def warm_up(folder: Path, seed: int) -> None:
    """The tasks, and the models that runs start from: the quickstart's before and after its supervised warm-up, and the
    look-up task's. Made in a process of its own."""
    import hybrid_grpo as hg

    sys.stdout = (folder / "warm_up.log").open("a")
    os.dup2(sys.stdout.fileno(), 2)
    sys.path.insert(0, str(SCRIPTS))
    import lookup_task
    import quickstart_task

    for module, name, prefix in ((quickstart_task, "cold", ""), (lookup_task, "lookup-cold", "lookup-")):
        tokenizer = module.make_tokenizer()
        quickstart_task.make_model(tokenizer, seed, positions=128).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        for split, rows in module.make_rows(seed).items():
            rows = [{**row, "split": split} for row in rows][: 128 if split == "heldout" else None]
            (folder / f"{prefix}{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = quickstart_task.make_tokenizer()
    with (folder / "answers.jsonl").open("w") as file:
        for line in (folder / "train.jsonl").read_text().splitlines():
            row = json.loads(line)
            ids = [*tokenizer(row["answer"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            of_tokens = {"token_ids": ids, "token_logp": [0.0] * len(ids)}
            file.write(json.dumps({"prompt": row["prompt"], "completion": row["answer"], **of_tokens}) + "\n")
    for name, model, data, steps in (("warm", "cold", "sft", 50), ("lookup", "lookup-cold", "lookup-sft", 150)):
        hg.sft(
            str(folder / model),
            str(folder / f"{data}.jsonl"),
            run={"dir": str(folder), "name": f"{name}-sft", "steps": steps},
            policy={"dtype": "float32", "lr": 1e-3, "warmup_steps": 10},
            sft={"batch_size": 64},
            log={"trackers": []},
            checkpoint={"every_minutes": 0},
            engine={"adam": "torch"},
        )
        (folder / f"{name}-sft/model").rename(folder / name)


def judged(case: Case, folder: Path, seconds: float) -> dict[str, Any]:
    """The outcome of a run: the alarms that went off, by name with their steps, and whether it passes."""
    lines = [json.loads(line) for line in (folder / case.name / "metrics.jsonl").read_text().splitlines()]
    file = folder / case.name / "alarms.jsonl"
    said = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    own = next((alarm["step"] for alarm in said if alarm["alarm"] == case.name), None)
    others = {alarm["alarm"]: alarm["step"] for alarm in reversed(said) if alarm["alarm"] != case.name}
    entry = {"run": case.name, "sick": case.sick, "steps": lines[-1]["step"], "others": others}
    if case.sick:
        late = None if own is None else own - ONSET + 1
        entry |= {"onset": ONSET, "alarm": own, "steps_after_onset": late}
        entry["message"] = next((alarm["message"] for alarm in said if alarm["alarm"] == case.name), None)
        passed = late is not None and 1 <= late <= STEPS and not others
    else:
        passed = not said
    return {**entry, "passed": passed, "seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keeps the runs, and the models that they begin with")
    parser.add_argument("--json", type=Path, help="results; of runs that were not chosen, those in the file are kept")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = [case for case in CASES if not arguments.only or case.name in arguments.only.split(",")]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hybrid_grpo.trainer", "hybrid_grpo.commands.stages.sft", "datasets", "peft"])
    found = []
    with tempfile.TemporaryDirectory() as place:
        folder = (arguments.folder or Path(place)).absolute()
        folder.mkdir(parents=True, exist_ok=True)

        def run(target: Callable[..., None], *given: Any) -> int | None:
            process = context.Process(target=target, args=given)
            process.start()
            process.join()
            return process.exitcode

        if not (folder / "lookup").exists():
            assert run(warm_up, folder, arguments.seed) == 0, (folder / "warm_up.log").read_text()
        for case in chosen:
            start = time.monotonic()
            shutil.rmtree(folder / case.name, ignore_errors=True)
            for phase in ("before", "after") if case.later else ("whole",):
                status = run(play, case.name, phase, folder, arguments.seed)
                assert status == 0, (folder / f"{case.name}.log").read_text()[-5000:]
            found.append(judged(case, folder, time.monotonic() - start))
            print(json.dumps(found[-1]), flush=True)
    print(f"{sum(entry['passed'] for entry in found)} of {len(found)} pass")
    if arguments.json:
        machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, shared with other programs"
        told = {"machine": machine, "seed": arguments.seed, "runs": found}
        if arguments.json.exists():
            names = {entry["run"] for entry in found}
            kept = [entry for entry in json.loads(arguments.json.read_text())["runs"] if entry["run"] not in names]
            order = [case.name for case in CASES]
            told["runs"] = sorted([*kept, *found], key=lambda entry: order.index(entry["run"]))
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
