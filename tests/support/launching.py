"""Starting the programs of rank_programs.py, and reading what every rank saw."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from paths import ROOT, SUPPORT

HERE = SUPPORT


def make_task(folder: Path) -> Path:
    """The quickstart's tiny model and data in `folder`."""
    script = ROOT / "training_scripts" / "quickstart_task.py"
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True)
    return folder


def free_port() -> str:
    """A port that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def ranks(
    world: int, name: str, folder: Path, accelerator: str = "cpu", programs: str = "rank_programs.py"
) -> list[dict[str, Any]]:
    """Run a program of rank_programs.py, or another file like it, on `world` ranks; what each rank saw."""
    program = [str(HERE / programs), name, str(folder)]
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", str(world), "--no_local_rank"]
    port = free_port()
    command = [sys.executable, *program] if world == 1 else [*launcher, "--master_port", port, *program]
    environment = {**os.environ, "DS_ACCELERATOR": accelerator, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not list(Path("/dev/shm").glob(f"deepspeed_*_{port}_*")), "memory that outlives its ranks"
    target, suffix = (folder, "") if folder.is_dir() else (folder.parent, f".{folder.name}")
    return [json.loads((target / f"{name}{suffix}.{world}.{rank}.json").read_text()) for rank in range(world)]
