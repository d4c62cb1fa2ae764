"""`report`: writes report.html of an existing run again."""

from pathlib import Path

from hybrid_grpo.config.errors import UserError


def run(arguments: list[str]) -> None:
    """Write the report of a run, whose folder is the only argument."""
    if arguments in (["-h"], ["--help"]):
        print("usage: hybrid-grpo report RUN_FOLDER")
        return
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UserError("usage: hybrid-grpo report RUN_FOLDER")
    folder = Path(arguments[0])
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder} is not the folder of a run: it has no metrics.jsonl")

    from hybrid_grpo.watch.frozen import write_report

    print(write_report(folder))
