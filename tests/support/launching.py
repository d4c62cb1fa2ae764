"""Running the programs of rank_programs.py and its like on ranks, and comparing what the ranks saw."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
from paths import ROOT, SUPPORT


def make_task(folder: Path) -> Path:
    """The tiny model of the letters and data in `folder`."""
    done = forks.run(ROOT / "training_scripts" / "letters_task.py", folder)
    assert done.status == 0, done.err
    return folder


def ranks(
    world: int, name: str, folder: Path, accelerator: str = "cpu", programs: str = "rank_programs.py"
) -> list[dict[str, Any]]:
    """Run a program of rank_programs.py, or another file like it, on `world` ranks; what each rank saw."""
    program = [str(SUPPORT / programs), name, str(folder)]
    if accelerator == "cpu":
        ended = forks.run(*program, world=world)
        assert ended.status == 0, ended.out[-3000:] + ended.err[-3000:]
    else:
        assert world == 1, "tests know of one GPU"
        environment = {**os.environ, "DS_ACCELERATOR": accelerator, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *program], capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    target, suffix = (folder, "") if folder.is_dir() else (folder.parent, f".{folder.name}")
    return [json.loads((target / f"{name}{suffix}.{world}.{rank}.json").read_text()) for rank in range(world)]


def assert_same_steps(ours: list[dict], alone: dict, minibatches: int = 1) -> None:
    """Rollouts are identical, and losses and gradient norms agree to 1e-5 relative."""
    for step in range(2):
        theirs = alone["rollouts"][step]
        # Every minibatch is shared out over the ranks, each with a contiguous part.
        parts = [seen["rollouts"][step] for seen in ours]
        share = len(theirs) // len(ours) // minibatches
        merged = [row for m in range(minibatches) for part in parts for row in part[m * share : (m + 1) * share]]
        assert [(row[0], row[1]) for row in merged] == [(row[0], row[1]) for row in theirs]
        assert [row[3] for row in merged] == [row[3] for row in theirs]
        for row, other in zip(merged, theirs, strict=True):
            assert row[2] == pytest.approx(other[2], abs=1e-5)
        for name in ("policy/loss", "policy/grad_norm", "reward/mean", "policy/entropy"):
            for seen in ours:
                assert seen["metrics"][step][name] == pytest.approx(alone["metrics"][step][name], rel=1e-5)
    assert [tokens for seen in ours for tokens in seen["greedy"]] == alone["greedy"]
    assert all(seen["eval"] == ours[0]["eval"] for seen in ours)
    evaluated = {name: value for name, value in alone["eval"].items() if name.startswith("eval/")}
    assert {name: ours[0]["eval"][name] for name in evaluated} == pytest.approx(evaluated, rel=1e-12)
