"""Run folders made on the spot."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run folder: lines of metrics.jsonl, config.yaml, and rows of rollouts by step."""

    def make(name: str, lines: list[dict[str, Any]], config: str = "", rollouts: dict[int, Any] | None = None) -> Path:
        folder = tmp_path / "runs" / name
        (folder / "rollouts").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (folder / "config.yaml").write_text(config)
        for step, rows in (rollouts or {}).items():
            text = "".join(f"{json.dumps(row)}\n" for row in rows)
            (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(text)
        return folder

    return make
