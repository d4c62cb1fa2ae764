"""The wandb dashboard of a run. It may fail in any way; the run goes on without it."""

import json
import netrc
import os
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from hybrid_grpo.run.files import json_safe

WandbMode = Literal["online", "offline", "disabled"]


def resolve_wandb_mode(mode: Literal["auto"] | WandbMode) -> WandbMode:
    """`auto` becomes what WANDB_MODE says, else online where an account is configured, else offline."""
    if mode != "auto":
        return mode
    known: WandbMode
    for known in ("online", "offline", "disabled"):
        if os.environ.get("WANDB_MODE") == known:
            return known
    return "online" if os.environ.get("WANDB_API_KEY") or _logged_in() else "offline"


def _logged_in() -> bool:
    """Whether `wandb login` has left a key, which it does in the netrc file."""
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].strip("/")
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbSink:
    """A wandb run. Whatever fails in wandb is warned of once and turns this sink off; it never stops the run."""

    TABLE_ROWS = 64
    """Completions of a step that go into the rollouts table; all are in rollouts/."""

    def __init__(
        self, project: str, run_dir: Path, settings: dict[str, Any], mode: WandbMode, resumes: bool = False
    ) -> None:
        self._run: Any = None
        self._attempt(lambda: self._open(project, run_dir, settings, mode, resumes))

    def _open(self, project: str, run_dir: Path, settings: dict[str, Any], mode: WandbMode, resumes: bool) -> None:
        import wandb  # here, so that a broken installation costs the dashboard only

        id_file = run_dir / "wandb" / "id"
        if not (resumes and id_file.exists()):
            id_file.parent.mkdir(parents=True, exist_ok=True)
            id_file.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            project=project,
            name=run_dir.name,
            id=id_file.read_text(),
            resume="allow",
            config=json_safe(settings),
            mode=mode,
            dir=str(run_dir),
            settings=wandb.Settings(init_timeout=60, console="off", silent=True),
        )
        offline = f"offline, upload with: wandb sync {run_dir}/wandb/latest-run"
        print(f"wandb: {self._run.url if mode == 'online' else offline}", flush=True)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._run = None
            reason = " ".join(str(error).split())
            warnings.warn(f"wandb is off for the rest of this run: {type(error).__name__}: {reason}", stacklevel=3)

    def write(self, step: int, values: dict[str, float]) -> None:
        if self._run:
            self._attempt(lambda: self._run.log(dict(values), step=step))

    def write_rollouts(self, step: int, lines: list[str]) -> None:
        """Log the first completions as a table."""
        if self._run:
            self._attempt(lambda: self._run.log({"rollouts": self._table(lines)}, step=step))

    def _table(self, lines: list[str]) -> Any:
        import wandb

        rows = [json.loads(line) for line in lines[: self.TABLE_ROWS]]
        names = ["step", "group", "prompt", "completion", "reward", "advantage", "length", "finish"]
        names += ["guest"] if any("guest" in row for row in rows) else []
        functions = list(rows[0]["rewards"]) if rows else []
        columns: list[str | int] = [*names, *(f"reward/{function}" for function in functions)]
        data = [
            [*(_cell(row.get(name, "")) for name in names), *(row["rewards"][name] for name in functions)]
            for row in rows
        ]
        return wandb.Table(columns=columns, data=data)

    def close(self) -> None:
        if self._run:
            self._attempt(lambda: self._run.finish())
            self._run = None


def _cell(value: Any) -> Any:
    """Chat messages as text; wandb takes one type a column."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
