"""What the functions that train return: a run that shows itself in a notebook, and that can be compared with others."""

from __future__ import annotations

import atexit
import subprocess
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.recipes import load_yaml
from hybrid_grpo.records.files import flattened
from hybrid_grpo.records.json_lines import read_jsonl
from hybrid_grpo.watch.settings import OF_EVERY_RUN

if TYPE_CHECKING:
    import pandas

_SHOWN = ("reward/mean", "sft/loss", "completion/length_mean", "policy/entropy", "policy/kl")
"""Metrics that a run shows of itself, besides accuracies."""
_ROWS = 6


@dataclass(frozen=True)
class FinishedRun:
    """The results of a run. As the last line of a notebook's cell, it shows a table and its curves."""

    folder: Path
    """The run folder."""

    @property
    def model(self) -> Path:
        """Folder of the trained model, which loads with `from_pretrained`."""
        return self.folder / "model"

    @property
    def metrics(self) -> pandas.DataFrame:
        """The metrics of metrics.jsonl as a table: one row per step, one column per metric."""
        import pandas

        return pandas.DataFrame(read_jsonl(self.folder / "metrics.jsonl"))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run by name, as in `policy.lr`."""
        return dict(flattened(load_yaml((self.folder / "config.yaml").read_text(encoding="utf-8")) or {}))

    def report(self) -> Path:
        """Write report.html again, a page with all curves and samples that needs no server, and return its path."""
        from hybrid_grpo.watch.frozen import write_report

        return write_report(self.folder)

    def watch(self) -> str:
        """Serve the page of `hybrid-grpo watch` for the folder that has this run, until the process ends, and return
        its address. Raises UserError if it cannot be served."""
        command = [sys.executable, "-m", "hybrid_grpo", "watch", str(self.folder.parent), "--watch.port", "0"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        atexit.register(server.terminate)
        assert server.stderr is not None
        line = server.stderr.readline()
        if not line.startswith("http"):
            raise UserError(line.strip().removeprefix("hybrid-grpo: error: ") or "the page cannot be served")
        return line.split()[0]

    def compare(self, *others: FinishedRun) -> pandas.DataFrame:
        """Return a table with one column per run: the settings in which they differ, and their last metrics."""
        import pandas

        runs = [self, *others]
        settings = [run.settings for run in runs]
        names = [name for name in dict.fromkeys(key for each in settings for key in each) if name not in OF_EVERY_RUN]
        both = {name: [each.get(name) for each in settings] for name in names}
        rows = {name: values for name, values in both.items() if any(value != values[0] for value in values)}
        last = [_last(read_jsonl(run.folder / "metrics.jsonl")) for run in runs]
        metrics = dict.fromkeys(name for each in last for name in each)
        rows |= {name: [each.get(name) for each in last] for name in metrics}
        columns = [run.folder.name if run.folder.parent == self.folder.parent else str(run.folder) for run in runs]
        return pandas.DataFrame.from_dict(rows, orient="index", columns=columns)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: some rows of the metrics, from the first to the last, and the curves."""
        from hybrid_grpo.records.publishing.curves import draw_curves

        lines = read_jsonl(self.folder / "metrics.jsonl")
        names = list(_last(lines))
        every = max(1, -(-(len(lines) - 1) // (_ROWS - 1)))
        head = "".join(f"<th>{escape(name)}</th>" for name in ("step", *names))
        body = "".join(
            f"<tr>{''.join(f'<td>{_text(line.get(name))}</td>' for name in ('step', *names))}</tr>"
            for line in [*lines[: len(lines) - 1 : every], *lines[-1:]]
        )
        curves = draw_curves(lines) or ""
        return f"<p><code>{escape(str(self.folder))}</code></p><table><tr>{head}</tr>{body}</table>{curves}"


def _last(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last values of the metrics that are shown."""
    found = {name: value for line in lines for name, value in line.items() if value is not None}
    return {name: value for name, value in found.items() if name in _SHOWN or name.endswith("/accuracy")}


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
