"""Checks whether a command beside training can run here, before it imports torch; see config/checks.py."""

import re
from pathlib import Path

from hybrid_grpo.commands.configs import ChatConfig, EvaluateConfig, GenerateConfig, ScoreConfig
from hybrid_grpo.config.checks import check_held_out, check_output, check_policy, check_rewards
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.sources import check_source
from hybrid_grpo.records.publishing.options import PublishOptionsConfig


def check_eval(config: EvaluateConfig) -> None:
    check_policy(config.policy)
    sets = check_held_out(config)
    refuse(
        not sets,
        "data.eval_path and data.eval_split are not set, and eval.sets is empty: name the prompts to evaluate on",
    )
    data = config.data
    if data.eval_path is not None:
        check_source("data.eval_path", data.eval_path)
    elif data.eval_split is not None and (data.path != "" or data.task is None):
        check_source("data.path", data.path)
    for held_out in sets if config.eval.output is not None else ():
        path = data.eval_path if held_out.rows is None else held_out.rows.path
        check_output("eval.output", str(config.eval.output), f"the prompts of {held_out.name}", path)


def check_generate(config: GenerateConfig, world_size: int) -> None:
    check_policy(config.policy)
    output = config.generate.output
    if config.reads_stdin:
        refuse(world_size > 1, f"data.path is standard input, which {world_size} ranks cannot share: give a source")
    elif config.data.path != "":
        check_source("data.path", config.data.path)
    refuse(output == "-" and world_size > 1, f"generate.output - cannot be shared by {world_size} ranks: name a file")
    check_output("generate.output", output, "the prompts of data.path", config.data.path)


def check_chat(config: ChatConfig, world_size: int) -> None:
    check_policy(config.policy)
    refuse(world_size > 1, f"chat runs in one process, but there are {world_size} ranks: start it without a launcher")


def check_score(config: ScoreConfig, source: str, *, is_run: bool) -> None:
    """Refuse scoring that would fail. `source` is a file of completions or, if `is_run`, the folder of a run."""
    check_rewards(config.rewards)
    score = config.score
    refuse(
        score.steps is not None and not re.fullmatch(r"\d+|\d+-\d*|-\d+", score.steps),
        f"score.steps {score.steps!r} is not a range of steps: give one as in 100-200, 100-, -200 or 100",
    )
    check_output("score.output", score.output, "the completions that are scored", source)
    output = Path(score.output)
    refuse(
        is_run and output.exists() and Path(source).resolve() in output.resolve().parents,
        f"score.output {output} would replace a file of the run: give another",
    )
    if not is_run:
        refuse(score.steps is not None, f"score.steps {score.steps}: {source} is not the folder of a run: remove it")
        if source != "-":
            check_source("SOURCE", source)


def check_publish(options: PublishOptionsConfig) -> None:
    """Raise UserError unless exactly one target is set."""
    refuse(
        (options.hub is None) == (options.folder is None),
        "publish.hub and publish.folder are "
        + ("both set: remove one" if options.hub else "not set: give one of them"),
    )
