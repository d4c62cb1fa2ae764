"""`data`: is this data set fit for training? Looks for faults of its rows, tells them, and writes the rows without.

It loads no model and needs no launcher. What is a fault is in `data/cleaning`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from hybrid_grpo.config import CheckDataConfig, CleanConfig
from hybrid_grpo.config.checks import check_clean
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.records.files import json_lines, reader_may_leave

if TYPE_CHECKING:
    from hybrid_grpo.data.cleaning.cleaner import Report


def run(arguments: list[str]) -> None:
    """Parse, look, tell and write; ends quietly when the reader of the output has closed it."""
    config = parse(CheckDataConfig, arguments, "data").config
    check_clean(config)

    from hybrid_grpo.data.cleaning.cleaner import clean

    tokenizer = None
    if config.policy.model:
        from hybrid_grpo.model.loading import load_tokenizer

        tokenizer = load_tokenizer(config.policy.model)
    rows, report = clean(config.data, config.clean, tokenizer)
    options = config.clean
    with reader_may_leave():
        if options.output is not None:
            with json_lines(options.output, "clean.output") as write:
                for row in rows:
                    write(row)
        if options.report is not None:
            with json_lines(options.report, "clean.report") as write:
                write(_as_json(report, options))
        _print(report, options, Console(stderr="-" in (options.output, options.report), highlight=False))


def _as_json(report: Report, options: CleanConfig) -> dict[str, Any]:
    found = {
        kind: {"action": getattr(options, kind), "count": len(findings), "rows": [asdict(one) for one in findings]}
        for kind, findings in report.found.items()
    }
    kept = {"rows": report.rows, "kept": len(report.kept)}
    lengths = {"unit": report.unit, **report.lengths}
    return {"source": report.source, **kept, "found": found, "lengths": lengths, "not_looked_for": report.not_looked}


def _print(report: Report, options: CleanConfig, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name, where in (("kind", "left"), ("rows", "right"), ("share", "right"), ("what becomes of them", "left")):
        table.add_column(name, justify=where, no_wrap=True)  # type: ignore[arg-type]  # a word of rich's
    done = "dropped" if options.output else "would be dropped"
    for kind, findings in report.found.items():
        action = done if getattr(options, kind) == "drop" else "kept"
        table.add_row(kind, f"{len(findings):,}", f"{len(findings) / report.rows:.2%}", action if findings else "")
    table.add_row("kept", f"{len(report.kept):,}", f"{len(report.kept) / report.rows:.2%}")
    console.print(f"{report.source}: {report.rows:,} rows", markup=False, soft_wrap=True)
    console.print(table)
    lengths = ", ".join(f"{name} {length:,}" for name, length in report.lengths.items())
    console.print(f"prompts in {report.unit}: {lengths}", markup=False, soft_wrap=True)
    for kind, findings in report.found.items():
        for one in findings[: options.examples]:
            shown = f": {one.text!r:.80}" if one.text else ""
            console.print(f"{kind}: row {one.row} {one.why}{shown}", markup=False, soft_wrap=True)
    for why in report.not_looked:
        console.print(f"not looked for: {why}", markup=False, soft_wrap=True)
    if options.output not in (None, "-"):
        console.print(f"{len(report.kept):,} rows written to {Path(str(options.output))}", markup=False, soft_wrap=True)
