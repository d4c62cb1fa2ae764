import json
from pathlib import Path
from typing import Any

import pytest

from hybrid_grpo.watch import trace_file
from hybrid_grpo.watch.trace_file import TraceFile, first_step, read_step


def line(step: int, **more: Any) -> str:
    histograms = {"reward": {"edges": [0, 1], "counts": [step]}}
    details = {"step": step, "prompts": [[step % 5, 0.5, 0.1]], "histograms": histograms}
    return json.dumps({**details, "stages": [[["generate", 0, 1]]], "decoder": [{"t": [0.1]}], **more}) + "\n"


@pytest.mark.parametrize("near", [10, 2**18])
def test_any_step_is_found_without_reading_the_others(
    tmp_path: Path, near: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also among damaged lines, and the one before where a step has none."""
    monkeypatch.setattr(trace_file, "_NEAR", near)
    path = tmp_path / "details.jsonl"
    there = [step for step in range(2, 300) if step % 10]
    text = "".join(line(step, words="x" * (step % 7 * 50)) + ("damaged\n" if step % 4 else "") for step in there)
    path.write_text(text + line(300)[:40])
    for step in range(310):
        wanted = max((other for other in there if other <= step), default=None)
        found = read_step(path, step)
        assert (found and found["step"]) == wanted
    newest = read_step(path, None)
    assert newest is not None
    assert (newest["step"], newest["stages"], first_step(path)) == (299, [[["generate", 0, 1]]], 2)
    gone = tmp_path / "gone.jsonl"
    assert (read_step(gone, 1), read_step(gone, None), first_step(gone)) == (None, None, None)


def test_rewards_and_histograms_are_gathered_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "details.jsonl"
    file = TraceFile(path)
    file.read(1)
    assert len(file.rewards) == 0
    path.write_text(line(1) + "damaged\n" + line(2) + line(3)[:50])
    file.read(1)
    assert (len(file.rewards), file.rewards.last, file.share_read) == (2, 2, 1.0)
    with path.open("a") as run:
        run.write(line(3)[50:])
    file.read(1)
    assert (len(file.rewards), file.rewards.last) == (3, 3)
    assert file.histograms.near(9) == (3, {"reward": {"edges": [0, 1], "counts": [3]}})
    path.write_text(line(1) + line(2, prompts=[[9, 0.0, 0.0]]))  # resumed after step 1
    file.read(1)
    assert file.rewards.ordered("row").tolist() == [1, 9]
