"""Training with a tool, ours against TRL's GRPOTrainer: the look-up task, the same warmed-up model and settings.

    python benchmarks/turns_beside.py --trl PYTHON [--steps 100] [--seed 0] [--tool-s 0.02] [--json FILE]

PYTHON is that of an environment created by `bash benchmarks/trl_env.sh FOLDER`. Both sides train for the same number of
steps, one after the other, each on one core with all its processes, including those of tools. With `--tool-s 0.02` the
tool answers after 0.02 s, as an `async def` (late_lookup.py), and not at once.

`step_s` and `trl_step_s` are mean seconds of the steps after the first, `step_ratio` is TRL's divided by ours. `wall_s`
and `trl_wall_s` are seconds of the whole commands, from the start to the written model, and `wall_ratio` is their
ratio. `accuracy` and `trl_accuracy` are measured by `hybrid-grpo eval` on the two models, for held-out keys at
temperature 1; `warm_accuracy` is that of the starting model.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from turns import ROOT, SCRIPTS, run

from hybrid_grpo.config import TrainConfig, to_dict
from hybrid_grpo.config.parsing import parse

ANSWER = 10
"""Observation tokens of template and tool between two turns of the look-up task."""


def warmed_up(place: str, seed: int) -> tuple[list[str], str]:
    """Write the task to a folder and warm up its model. Returns the settings of `train`, and the file of held-out
    keys."""
    task, shared = Path(place, "task"), ["--run.dir", place, "--run.seed", str(seed), "--log.wandb", "disabled"]
    run(SCRIPTS / "lookup_task.py", task, "--seed", str(seed))
    sft = ["--config", SCRIPTS / "lookup_sft.yaml", "--policy.model", task / "model", "--data.path", task / "sft.jsonl"]
    run("-m", "hybrid_grpo", "sft", *sft, *shared)
    model, data = Path(place, "lookup-sft/model"), task / "train.jsonl"
    train = ["--config", SCRIPTS / "lookup.yaml", "--policy.model", model, "--data.path", data]
    return [*map(str, train), *shared], str(task / "heldout.jsonl")


def measure(python: Path, seed: int, steps: int, tool_s: float | None) -> dict[str, Any]:
    """Train on both sides."""
    with tempfile.TemporaryDirectory() as place:
        settings, held_out = warmed_up(place, seed)
        settings += ["--run.steps", str(steps), "--eval.every", "0"]
        if tool_s is not None:
            os.environ["TOOL_S"] = str(tool_s)
            settings += ["--rollout.tools", json.dumps([f"{ROOT / 'benchmarks/late_lookup.py'}:look_up"])]
        config = parse(TrainConfig, settings, "train").config
        rows = config.rollout.prompts_per_step * config.rollout.num_generations
        told = {"config": to_dict(config), "micro_rows": rows, "steps": steps, "tool_tokens": ANSWER, "folder": place}
        spec = Path(place, "spec.json")
        spec.write_text(json.dumps(told))
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        start = time.perf_counter()
        run("-m", "hybrid_grpo", "train", *settings)
        middle = time.perf_counter()
        run(ROOT / "benchmarks/turns_trl.py", spec, python=python)
        wall_s, trl_wall_s = middle - start, time.perf_counter() - middle
        lines = [json.loads(line) for line in Path(place, "lookup/metrics.jsonl").read_text().splitlines()]
        steps_s = [line["time/step_s"] for line in lines]
        theirs = json.loads(Path(place, "trl.json").read_text())
        models = [config.policy.model, Path(place, "lookup/model"), Path(place, "model")]
        recipe = ["--config", Path(place, "lookup/config.yaml"), "--data.eval_path", held_out]
        evaluate = ["-m", "hybrid_grpo", "eval", *recipe, "--policy.model"]
        said = [run(*evaluate, model).splitlines()[-1] for model in models]
        accuracy = [json.loads(line)["eval/heldout/accuracy"] for line in said]
    step_s, trl_step_s = mean(steps_s[1:]), mean(theirs["steps_s"][1:])
    return {
        "steps": steps,
        "tool_s": tool_s or 0.0,
        "step_s": step_s,
        "trl_step_s": trl_step_s,
        "step_ratio": trl_step_s / step_s,
        "wall_s": wall_s,
        "trl_wall_s": trl_wall_s,
        "wall_ratio": trl_wall_s / wall_s,
        **dict(zip(("warm_accuracy", "accuracy", "trl_accuracy"), accuracy, strict=True)),
        "reward_first": lines[0]["reward/mean"],
        "reward_last": lines[-1]["reward/mean"],
        "trl_reward_first": theirs["rewards"][0],
        "trl_reward_last": theirs["rewards"][-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, help="python of an environment with TRL")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tool-s", type=float, help="seconds that the tool takes; not given: none")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    result = measure(given.trl, given.seed, given.steps, given.tool_s)
    print(json.dumps(result, indent=1))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
