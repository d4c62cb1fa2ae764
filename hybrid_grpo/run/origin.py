"""What a run was made with: versions, the commit, the number of ranks."""

import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from hybrid_grpo.model.ranks import world_size


def origin() -> dict[str, str]:
    """Facts for the head of config.yaml, by name."""
    packages = ("hybrid-grpo", "torch", "deepspeed", "transformers", "datasets")
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": ", ".join([f"python {platform.python_version()}", *(f"{p} {version(p)}" for p in packages)]),
        "git commit": _git_commit(),
        "ranks": str(world_size()),
    }


def _git_commit() -> str:
    """Commit of the git checkout that the package runs from; "none" where there is no checkout."""
    here = Path(__file__).parent
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        commit, changes = (
            subprocess.run(c, cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
            for c in commands
        )
    except (OSError, subprocess.SubprocessError):
        return "none"
    return f"{commit} with uncommitted changes" if changes else commit
