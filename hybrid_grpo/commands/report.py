"""`report`: writes report.html of an existing run again, or prints a summary of the run as text."""

from pathlib import Path

from hybrid_grpo.config.errors import UserError

_USAGE = "usage: hybrid-grpo report RUN_FOLDER [--text]"
_HELP = f"""{_USAGE}

Write report.html of a run again. With --text, print a summary to paste into an issue instead: versions, changed
settings, speed, results and alarms, without secrets and without this machine's folders."""


def run(arguments: list[str]) -> None:
    """Write the report of a run, whose folder is the only argument besides `--text`."""
    if arguments in (["-h"], ["--help"]):
        print(_HELP)
        return
    names = [argument for argument in arguments if argument != "--text"]
    if len(names) != 1 or names[0].startswith("-"):
        raise UserError(_USAGE)
    folder = Path(names[0])
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder} is not the folder of a run: it has no metrics.jsonl")
    if "--text" in arguments:
        from hybrid_grpo.records.publishing.summary import summary_text

        print(summary_text(folder))
        return

    from hybrid_grpo.watch.frozen import write_report

    print(write_report(folder))
