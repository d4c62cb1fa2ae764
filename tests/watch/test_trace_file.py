import json
from pathlib import Path
from typing import Any

from hybrid_grpo.watch.trace_file import first_step, read_step


def line(step: int, **more: Any) -> str:
    return json.dumps({"step": step, "stages": [[["generate", 0, 1]]], "decoder": [{"t": [0.1]}], **more}) + "\n"


def test_any_step_is_found_without_reading_the_others(tmp_path: Path) -> None:
    """Also among damaged lines, and the one before where a step has none."""
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
