"""What the settings of rewards must not be, and those of the commands that run rewards without a model."""

from __future__ import annotations

import math
import re
from pathlib import Path

from hybrid_grpo.config import RewardConfig, ScoreConfig, ServeRewardConfig, reward_name
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.field_checks import check_fields, check_name, check_output, check_source
from hybrid_grpo.config.grpo_checks import check_grpo
from hybrid_grpo.config.network import bearer_token, is_loopback


def check_score(config: ScoreConfig, source: str, *, is_run: bool) -> None:
    """Refuse settings that cannot work, before anything is loaded.

    Args:
        source: a file of completions, or the folder of a run.

    Raises:
        UserError: one line that names the settings and the way out.
    """
    check_rewards(config.rewards)
    check_fields("scoring", config.scoring)
    limit, score = config.data.limit, config.score
    refuse(
        score.steps is not None and not re.fullmatch(r"\d+|\d+-\d*|-\d+", score.steps),
        f"score.steps {score.steps!r} is no range of steps: give one as in 100-200, 100-, -200 or 100",
    )
    refuse(score.limit < 0, f"score.limit {score.limit} must be 0 or greater")
    refuse(score.output == "", "score.output is empty: give a file, or take it out")
    if score.output is not None:
        check_output("score.output", score.output, "the completions that are scored", source)
    if is_run:
        refuse(score.output == "-", "score.output -: the report of a run is a file: give one, or take it out")
        check_grpo(config)
        return
    for name in ("steps", "threshold"):
        value = getattr(score, name)
        refuse(value is not None, f"score.{name} {value}: {source} is not the folder of a run: take it out")
    refuse(limit is not None and limit < 1, f"data.limit {limit} must be 1 or greater")
    if source != "-":
        check_source("SOURCE", source)


def check_serve(config: ServeRewardConfig) -> None:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        UserError: one line that names the settings and the way out.
    """
    check_rewards(config.rewards)
    check_fields("scoring", config.scoring)
    serve = config.serve
    for name, least in (("port", 0), ("max_requests", 1)):
        refuse(getattr(serve, name) < least, f"serve.{name} {getattr(serve, name)} must be {least} or greater")
    for name in ("max_body_mb", "timeout_s"):
        refuse(getattr(serve, name) <= 0, f"serve.{name} {getattr(serve, name)} must be greater than 0")
    refuse(serve.port > 65535, f"serve.port {serve.port} must be 65535 or lower")
    refuse(not serve.label_column.isidentifier(), f"serve.label_column {serve.label_column!r} must be a name")
    refuse("" in serve.ends, f"serve.ends {serve.ends}: an empty text ends everything: take it out")
    refuse(
        serve.token_env is None and not is_loopback(serve.host),
        f"serve.host {serve.host} can be reached from other machines: name the environment variable with a token in"
        " serve.token_env",
    )
    if serve.token_env is not None:
        try:
            bearer_token("serve.token_env", serve.token_env)
        except ValueError as error:
            raise UserError(str(error)) from None
    refuse(serve.key is not None and serve.certificate is None, "serve.key is set: give serve.certificate as well")
    for name in ("certificate", "key"):
        path = getattr(serve, name)
        refuse(path is not None and not Path(path).is_file(), f"serve.{name} {path}: there is no such file")


def check_rewards(rewards: list[RewardConfig]) -> list[str]:
    """The names of the rewards, in order."""
    refuse(
        not rewards,
        "rewards is empty: give at least one, as in --rewards '[{function: exact_match}]', or a data.task, which has"
        " its own",
    )
    for index, reward in enumerate(rewards):
        refuse(not reward.function, f"rewards[{index}].function is empty: name a built-in or a function")
        if reward.name is not None:
            check_name(f"rewards[{index}].name", reward.name, "it names a metric")
        refuse(not math.isfinite(reward.weight), f"rewards[{index}].weight {reward.weight} must be a finite number")
        refuse(reward.timeout_s <= 0, f"rewards[{index}].timeout_s {reward.timeout_s} must be greater than 0")
        refuse(
            isinstance(reward.batch_size, int) and reward.batch_size < 1,
            f"rewards[{index}].batch_size {reward.batch_size} must be 1 or greater, group or auto",
        )
    names = [reward_name(reward) for reward in rewards]
    doubles = {name for name in names if names.count(name) > 1}
    refuse(bool(doubles), f"rewards: two are named {', '.join(sorted(doubles))}: set `name` on one of them")
    return names
