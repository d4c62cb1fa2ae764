"""Programs of tests/run/test_rollback_laws.py: runs on one rank that go back to a checkpoint; see rank_programs.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rank_programs import main

import hybrid_grpo as hg
from hybrid_grpo.config.errors import RunStopped

Bad = Callable[[int, int], bool]


def back(folder: Path) -> dict[str, Any]:
    """What is seen of each run; the reward of a step is too high where `bad` says so of the step and of how often it
    was made before."""
    patient = {"reward/max": {"above": 5, "patience": 2, "action": "roll_back"}}
    at_once = {"reward/max": {"above": 5, "patience": 1, "action": "roll_back"}}
    critic = {"critic": {"enabled": True, "lr": 1e-3}, "checkpoint": {"asynchronous": True}}
    return {
        "without end": run(folder, lambda step, _: step == 3, at_once, guard={"max_rollbacks": 2}),
        "in doubt": run(folder, lambda step, again: step in (3, 4) and not again, patient),
        "doubt that was none": run(folder, lambda step, _: step == 3, patient),
        "critic": run(folder, lambda step, again: step == 3 and not again, at_once, **critic),
        "broken weights": run(
            folder,
            lambda *_: False,
            {},
            policy={"lr": 1e6},
            guard={"non_finite": "roll_back", "patience": 1, "lr_factor": 1e-5},
        ),
    }


def run(folder: Path, bad: Bad, numbers: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """Five steps with a checkpoint after each: its numbers, how it ended, and of each step that was made, in order, the
    checkpoints that there were."""
    name, made = f"run{len(list(folder.glob('run*')))}", list[tuple[int, list[str]]]()
    checkpoints = folder / name / "checkpoints"

    def reward(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        step = trainer_state.global_step + 1
        is_bad = bad(step, sum(number == step for number, _ in made))
        made.append((step, sorted(path.name for path in checkpoints.glob("step_*"))))
        return [(9.0 if is_bad else 1.0) * len(set(text)) / 8 + 8.0 * is_bad for text in completions]

    reward.batch_size = 8  # type: ignore[attr-defined]  # one call a step
    settings: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder), "name": name, "steps": 5},
        "policy": {"dtype": "float32", "lr": 1e-3},
        "rollout": {"prompts_per_step": 2, "num_generations": 4, "max_completion_tokens": 8},
        # In place when the step ends, so that a reward sees what there is.
        "checkpoint": {"every": 1, "keep": 9, "asynchronous": False},
        "log": {"wandb": "disabled"},
        "alarms": {"numbers": numbers},
        "guard": {},
    }
    for section, values in sections.items():
        settings[section] = {**settings.get(section, {}), **values}
    stopped = ""
    here = {"function": reward, "isolation": "none"}
    try:
        hg.train(model=folder / "model", data=str(folder / "train.jsonl"), rewards=[here], **settings)
    except RunStopped as error:
        stopped = str(error)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return {"stopped": stopped, "made": made, "lines": lines}


if __name__ == "__main__":
    main(globals())
