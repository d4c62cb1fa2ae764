"""A run's folder, as wandb finds it."""

import json
from pathlib import Path
from typing import Any


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def rows(step: int) -> list[dict[str, Any]]:
    """Three groups of three completions, whose rewards are the number of the group times that of the sample."""
    shared = {"step": step, "prompt": "sort: ba", "length": 3, "finish": "stop"}
    return [
        {
            **{**shared, "group": group, "sample": sample, "completion": f"{group}{sample}"},
            **{"reward": float(group * sample), "rewards": {"exact": float(group * sample)}},
            "advantage": float((sample - 1) * group),
        }
        for group in range(3)
        for sample in range(3)
    ]


def make_run(folder: Path) -> None:
    """Two steps with rollouts of both, and an alarm at the second."""
    times = {"time/step_s": 1800.0, "completion/sampled_tokens": 18.0}
    write_lines(folder / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5, "policy/loss": None, **times}])
    write_lines(folder / "metrics.jsonl", [{"step": 2, "reward/mean": 0.25, "eval/heldout/accuracy": 0.125, **times}])
    write_lines(folder / "alarms.jsonl", [{"step": 2, "message": "the gap is wide"}])
    for step in (1, 2):
        write_lines(folder / "rollouts" / f"step_{step:06d}.jsonl", rows(step))
    (folder / "config.yaml").write_text("run: {}\n")
    (folder / "report.html").write_text("<p>report</p>")
