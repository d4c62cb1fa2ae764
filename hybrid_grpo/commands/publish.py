"""`publish`: puts the trained model of a run, with a model card, on the Hugging Face hub or into a folder."""

from pathlib import Path

from hybrid_grpo.commands.configs import PublishConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.parsing import leading_argument, parse
from hybrid_grpo.records.publishing.options import PublishOptionsConfig

COMMAND = "publish RUN"


def run(arguments: list[str]) -> None:
    folder, options = leading_argument(arguments, f"{COMMAND} --publish.hub NAME or --publish.folder FOLDER")
    print(publish(Path(folder), parse(PublishConfig, options, COMMAND).config.publish))


def publish(folder: Path, options: PublishOptionsConfig) -> str:
    """Publish the model of the run in `folder`; return the address of the repository or folder. Raises UserError."""
    refuse((options.hub is None) == (options.folder is None), "publish.hub and publish.folder: give one of them")

    from hybrid_grpo.records.publishing import publication

    return publication.publish(folder, options)
