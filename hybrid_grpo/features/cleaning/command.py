"""`data`: reports faulty rows of a data set, and writes the other rows. It loads no model and needs no launcher."""

from __future__ import annotations

from dataclasses import asdict, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass
from rich.console import Console
from rich.table import Table

from hybrid_grpo.config.checks import check_data, check_output
from hybrid_grpo.config.commands import RecipeReader, refuse_mixture
from hybrid_grpo.config.data import DataConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import SECTION
from hybrid_grpo.config.model import PolicyConfig
from hybrid_grpo.config.parsing import leading_argument, parse
from hybrid_grpo.features.cleaning.settings import CleanConfig
from hybrid_grpo.records.console import make_console
from hybrid_grpo.records.files import json_lines, reader_may_leave

if TYPE_CHECKING:
    from hybrid_grpo.features.cleaning.cleaner import Report

COMMAND = "data [FILE]"


@dataclass(frozen=True, config=SECTION)
class CheckDataConfig(RecipeReader):
    """Look for faults in the training rows, print what was found, and write the rows that are kept. The command loads
    only the tokenizer of `policy.model`, not the model. It takes the recipe of `train` or `sft`."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    data: DataConfig = field(default_factory=DataConfig)
    clean: CleanConfig = field(default_factory=CleanConfig)

    command = "data"

    @model_validator(mode="after")
    def _check_mixture(self) -> CheckDataConfig:
        refuse_mixture(self.data, "data")
        return self


def run(arguments: list[str]) -> None:
    """Parse the arguments, check the rows and write the result; end quietly if the reader of the output closes it."""
    name, others = leading_argument(arguments, f"{COMMAND} [options]", optional=True)
    config = parse(CheckDataConfig, ["--data.path", name, *others] if name else others, COMMAND).config
    _check_place(config)

    from hybrid_grpo.features.cleaning.cleaner import clean

    tokenizer = None
    if config.policy.model:
        from hybrid_grpo.model.loading import load_tokenizer

        tokenizer = load_tokenizer(config.policy.model)
    rows, report = clean(config.data, config.clean, tokenizer)
    options = config.clean
    with reader_may_leave():
        for name, lines in (("output", rows), ("report", [_as_json(report, options)])):
            if (file := getattr(options, name)) is not None:
                with json_lines(file, f"clean.{name}") as write:
                    for line in lines:
                        write(line)
        _print(report, options, make_console(stderr="-" in (options.output, options.report), highlight=False))


def _check_place(config: CheckDataConfig) -> None:
    """Raise UserError if a package is missing or a file cannot be written."""
    data, clean = config.data, config.clean
    check_data(data)
    for setting, package in (("near_duplicates", "rensa"), ("encoding", "ftfy"), ("languages", "py3langid")):
        refuse(
            getattr(clean, setting) != "off" and find_spec(package) is None,
            f"clean.{setting} needs {package}, which is not installed: pip install 'hybrid_grpo[clean]', or set"
            f" clean.{setting} to off",
        )
    for name in ("output", "report"):
        if (file := getattr(clean, name)) is not None:
            check_output(f"clean.{name}", file, "the rows of data.path", data.path)
            check_output(f"clean.{name}", file, "the held-out rows of data.eval_path", data.eval_path)
    refuse(
        clean.output is not None and clean.output == clean.report,
        f"clean.output and clean.report are both {clean.output}: give two files",
    )


def _as_json(report: Report, options: CleanConfig) -> dict[str, Any]:
    found = {
        kind: {"action": getattr(options, kind), "count": len(findings), "rows": [asdict(one) for one in findings]}
        for kind, findings in report.found.items()
    }
    kept = {"rows": report.rows, "kept": len(report.kept)}
    lengths = {"unit": report.unit, **report.lengths}
    return {"source": report.source, **kept, "found": found, "lengths": lengths, "not_looked_for": report.skipped}


def _print(report: Report, options: CleanConfig, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("kind", "rows", "share", "action"):
        table.add_column(name, justify="right" if name in ("rows", "share") else "left", no_wrap=True)
    dropped = "dropped" if options.output else "would be dropped"
    for kind, findings in report.found.items():
        action = dropped if getattr(options, kind) == "drop" else "kept"
        if (short := sum(one.is_short for one in findings)) and action == dropped:
            action = f"{dropped}, but for {short} short ones"
        table.add_row(kind, f"{len(findings):,}", f"{len(findings) / report.rows:.2%}", action if findings else "")
    table.add_row("kept", f"{len(report.kept):,}", f"{len(report.kept) / report.rows:.2%}")
    lengths = ", ".join(f"{name} {length:,}" for name, length in report.lengths.items())
    lines = [f"prompts in {report.unit}: {lengths}"]
    for kind, findings in report.found.items():
        lines += [
            f"{kind}: row {one.row} {one.why}" + (f": {one.text!r:.80}" if one.text else "")
            for one in findings[: options.examples]
        ]
    lines += [f"not looked for: {why}" for why in report.skipped]
    if options.output not in (None, "-"):
        lines.append(f"{len(report.kept):,} rows written to {Path(str(options.output))}")
    console.print(f"{report.source}: {report.rows:,} rows", markup=False, soft_wrap=True)
    console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
