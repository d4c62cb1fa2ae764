"""Carried groups: what a step takes with and without `rollout.carry`, and whether a killed run goes on with them.

    python benchmarks/carry.py [--shares 0.1 0.25] [--steps 30] [--kills 10] --json benchmarks/results/carry.json

`times`: one rank, the quickstart's model, 32 prompts with 8 completions each, whose
lengths are given: log-normal, with a median of 40 tokens, prompts that differ by 0.7 in log length and their
completions by 0.5, and at most 20 times the median. Learning rate 0, so that all see the same weights. Trainers with
and without carry take turns; the first steps, until as many long groups are carried as later, are not counted.

    step, rollout, learn   medians of seconds, `ratio` of the means of all steps to those without carry
    span                   tokens after which sampling ended, in the mean
    old_frac               share of tokens learned from that were sampled in earlier steps
    length                 mean length of completions learned from: with carry over without

`modelled`: the same rule without a model, over 60 steps, and the time of rollout and step on an H200 by the times of
overlap.py: the bytes of each decode step, and the operations of prefills and training. `tail` are lengths of which 3 %
of the prompts have a median 15 times that of the others.

`kills`: two ranks that are killed at random and go on with --run.resume auto, until 12 steps are done; numbers that
differ from those of a run without kills, and whether the models are equal to the bit.

What carry does to learning: python benchmarks/learning.py --workload ragged --sides hybrid,settings --seeds 0,1,2
--settings '--rollout.carry 0.1'.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from overlap import BANDWIDTH, CASES, LAUNCH_S, MFU, OPERATIONS, Case

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "training_scripts"))

from quickstart_task import make_model, make_rows, make_tokenizer  # noqa: E402
from step_hybrid import forced  # noqa: E402

PROMPTS, GROUP, MEDIAN, LONGEST = 32, 8, 40, 800
FIRST_STEPS = 8
PARTS = ("step", "rollout", "learn")


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text)) % 7) for text in completions]


def length_of(prompt_ids: list[int], key: int) -> int:
    """Return the length of a completion, a function of its prompt and its random stream."""
    mean = math.log(MEDIAN) + random.Random(str(prompt_ids)).gauss(0, 0.7)
    return min(max(1, round(math.exp(random.Random(key).gauss(mean, 0.5)))), LONGEST)


def lengths_of(request: Any) -> list[int]:
    return [length_of(request.prompt_ids, key) for key in request.keys]


def trainer_of(folder: Path, carry: float) -> Any:
    from hybrid_grpo import engine
    from hybrid_grpo.config import TrainConfig
    from hybrid_grpo.config.checks import check_train
    from hybrid_grpo.config.parsing import parse
    from hybrid_grpo.policy import Policy
    from hybrid_grpo.run.inputs import RunInputs
    from hybrid_grpo.trainer import Trainer

    settings = {
        **{"policy.model": folder / "model", "policy.dtype": "float32", "policy.warmup_steps": 10**9},
        **{"data.path": folder / "train.jsonl", "rollout.prompts_per_step": PROMPTS, "rollout.carry": carry},
        **{"rollout.num_generations": GROUP, "rollout.max_completion_tokens": LONGEST, "rollout.ignore_eos": True},
        **{"rewards": f"[{{function: {__file__}:reward}}]", "log.wandb": "disabled", "engine.zero_stage": 0},
    }
    config = parse(TrainConfig, [f"--{name}={value}" for name, value in settings.items()], "train").config
    plan, device, inputs = check_train(config, 1), engine.start(), RunInputs.read(config)
    policy = Policy(config.policy, config.engine, inputs.tokenizer, total_steps=10**9, decoder=config.rollout.decoder)
    return Trainer(config, plan, policy, None, inputs, device)


def step_of(trainer: Any, number: int) -> dict[str, float]:
    begin = time.perf_counter()
    rollout, scores = trainer.collect(number)
    middle = time.perf_counter()
    trainer.learn(rollout, scores)
    end = time.perf_counter()
    trainer.measure(rollout, scores)
    values = trainer.meter.reduce()
    found = {"step": end - begin, "rollout": middle - begin, "learn": end - middle}
    found["length"] = values["completion/length_mean"]
    for name in ("span", "old_frac", "policies_max"):
        found[name] = values.get(f"carry/{name}", 0.0)
    return found


def times(folder: Path, shares: list[float], steps: int) -> dict[str, Any]:
    """Return what the steps of trainers with the given shares took, which took turns."""
    tokenizer = make_tokenizer()
    make_model(tokenizer, 0, positions=1024).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(0)["train"]))
    sides = {share: trainer_of(folder, share) for share in (0.0, *shares)}
    found: dict[float, list[dict[str, float]]] = {share: [] for share in sides}
    with forced(lengths_of):
        for number in range(1, FIRST_STEPS + steps + 1):
            for share, trainer in sides.items():
                found[share].append(step_of(trainer, number))
    found = {share: of[FIRST_STEPS:] for share, of in found.items()}

    def mean(share: float, name: str) -> float:
        return statistics.fmean(of[name] for of in found[share])

    result: dict[str, Any] = {}
    for share, rows in found.items():
        of: dict[str, Any] = {name: round(statistics.median(row[name] for row in rows), 3) for name in PARTS}
        if share:
            of["ratio"] = {name: round(mean(share, name) / mean(0.0, name), 3) for name in PARTS}
            of |= {name: round(mean(share, name), 3) for name in ("span", "old_frac")}
            of["policies_max"] = max(row["policies_max"] for row in rows)
            of["length"] = round(mean(share, "length") / mean(0.0, "length"), 3)
        result[f"carry {share:g}"] = of
    return result


Lengths = tuple[float, float, float]
"""Of prompts, the deviation of log lengths and the share that are 15 times as long; and the deviation within groups."""
LENGTHS: dict[str, Lengths] = {"log-normal": (0.7, 0.0, 0.5), "tail": (0.3, 0.03, 0.3)}
_Group = tuple[int, list[tuple[int, int]]]
"""How often a group was carried, and of each completion the tokens so far and in the end."""


def modelled(case: Case, prompts: int, share: float, lengths: Lengths, steps: int = 60) -> dict[str, float]:
    """Return the means of a step's seconds of rollout and training, its span and the share of old tokens."""
    between, rare, within = lengths
    draw, carried, found = random.Random(0), [], []
    most, count = 20 * case.median, max(1, round(share * prompts)) if share else 0

    def group() -> _Group:
        mean = math.log(case.median) + draw.gauss(0, between) + (math.log(15) if draw.random() < rare else 0)
        ends = [min(max(1, round(math.exp(draw.gauss(mean, within)))), most) for _ in range(GROUP)]
        return 0, [(0, end) for end in ends]

    for _ in range(steps):
        groups: list[_Group] = carried + [group() for _ in range(prompts + count - len(carried))]
        spans = [max(end - so_far for so_far, end in of) for _, of in groups]
        order = sorted(range(len(groups)), key=lambda i: (groups[i][0] < 4, spans[i]))[:prompts]
        span = max(spans[i] for i in order)
        learned = [completion for i in order for completion in groups[i][1]]
        tokens = sum(end for _, end in learned)
        seconds = decoding([completion for _, of in groups for completion in of], span, case)
        training = case.operations * case.parameters * tokens / (MFU * OPERATIONS)
        found.append((seconds, training, span, sum(so_far for so_far, _ in learned) / tokens))
        left = [i for i in range(len(groups)) if i not in set(order)]
        carried = [(groups[i][0] + 1, [(min(end, s + span), end) for s, end in groups[i][1]]) for i in left]
    names = ("rollout", "training", "span", "old_frac")
    return {name: statistics.fmean(of[i] for of in found[10:]) for i, name in enumerate(names)}


def decoding(completions: list[tuple[int, int]], span: int, case: Case) -> float:
    """Return the seconds of decoding completions for `span` steps, after reading what they have so far."""
    seconds = 2 * case.parameters * sum(so_far for so_far, _ in completions) / (MFU * OPERATIONS)
    context = statistics.fmean(so_far for so_far, _ in completions)
    done, alive = 0, len(completions)
    for end in sorted(min(end - so_far, span) for so_far, end in completions):
        mean = (done + end) / 2 + context
        step_s = (2 * case.parameters + alive * mean * case.token_bytes) / BANDWIDTH + LAUNCH_S
        seconds, done, alive = seconds + (end - done) * step_s, end, alive - 1
    return seconds


def all_modelled(shares: list[float]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for case in (CASES[0], CASES[1], CASES[4]):
        for kind, lengths in LENGTHS.items():
            plain = modelled(case, PROMPTS, 0.0, lengths)
            for share in shares:
                of = modelled(case, PROMPTS, share, lengths)
                step = (of["rollout"] + of["training"]) / (plain["rollout"] + plain["training"])
                ratios = {"rollout": of["rollout"] / plain["rollout"], "step": step, "span": of["span"] / plain["span"]}
                numbers = {**ratios, "old_frac": of["old_frac"]}
                result[f"{case.name}, {kind}, carry {share:g}"] = {n: round(v, 3) for n, v in numbers.items()}
    return result


def kills(folder: Path, count: int) -> dict[str, Any]:
    """Return how a run that was killed `count` times compares with one that was not."""
    rows = make_rows(0)
    for name, of in (("train", rows["train"][:64]), ("heldout", rows["heldout"][:16])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of))
    tokenizer = make_tokenizer()
    make_model(tokenizer, 0).save_pretrained(folder / "small")
    tokenizer.save_pretrained(folder / "small")
    command = [Path(sys.executable).with_name("deepspeed"), "--num_accelerators", 2, "--no_local_rank"]
    command += ["--module", "hybrid_grpo", "train", "--policy.model=small", "--policy.dtype=float32"]
    command += ["--data.path=train.jsonl", "--rewards=[{function: letters_in_place}]", "--run.steps=12"]
    command += ["--rollout.prompts_per_step=8", "--rollout.num_generations=4", "--rollout.max_completion_tokens=56"]
    command += ["--rollout.carry=0.25", "--checkpoint.every=1", "--run.resume=auto", "--log.wandb=disabled"]
    command += ["--policy.lr=1e-3"]

    def started(name: str) -> subprocess.Popen[bytes]:
        arguments = [*map(str, command), f"--run.name={name}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(arguments, cwd=folder, start_new_session=True, **quiet)  # type: ignore[call-overload]

    assert started("whole").wait() == 0
    draw, killed, metrics = random.Random(0), 0, folder / "runs" / "killed" / "metrics.jsonl"
    while killed < count:
        process, before = started("killed"), len(lines(metrics))
        while process.poll() is None and len(lines(metrics)) == before:
            time.sleep(0.05)
        assert process.poll() is None, "a step is made between two kills"
        time.sleep(draw.uniform(0, 1.0))
        for rank in ranks_of(process.pid):
            rank.send_signal(signal.SIGKILL)
        process.wait()
        killed += 1
    assert started("killed").wait() == 0
    ours, theirs = lines(folder / "runs" / "whole" / "metrics.jsonl"), lines(metrics)
    timed = ("time/", "throughput/", "memory/")
    differ = sum(
        value != theirs[step].get(name)
        for step, line in ours.items()
        for name, value in line.items()
        if not name.startswith(timed)
    )
    models = [(folder / "runs" / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    old = [line["carry/old_frac"] for line in ours.values() if "carry/old_frac" in line]
    return {
        "kills": killed,
        "numbers_that_differ": differ,
        "models_equal": models[0] == models[1],
        "old_frac": round(statistics.fmean(old), 3),
    }


def ranks_of(pid: int) -> list[Any]:
    import psutil

    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def lines(path: Path) -> dict[int, dict[str, Any]]:
    if not path.exists():
        return {}
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {line["step"]: line for line in map(json.loads, whole)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.1, 0.25])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"modelled": all_modelled(options.shares)}
    folder = Path(tempfile.mkdtemp(prefix="carry"))
    if options.steps:
        found["times"] = times(folder, options.shares, options.steps)
    if options.kills:
        found["kills"] = kills(folder, options.kills)
    shutil.rmtree(folder)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
