"""Settings of reward functions: which are used, how they are run, and how they are served to other machines."""

from dataclasses import field
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config import fields
from hybrid_grpo.config.about import MAY_CHANGE, About
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.secrets import refuse_masked


@dataclass(frozen=True, config=fields.SECTION)
class RewardConfig:
    """One reward function."""

    function: fields.Function
    """`exact_match` or another built-in, `path/to/file.py:function`, or `package.module:function`; in Python also the
    function itself."""
    weight: fields.Number = 1.0
    """Weight of this reward in the sum of rewards."""
    name: fields.Name | None = None
    """Name of the reward in the metrics. Default: the function's name."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Fixed keyword arguments for the function. A secret, recognized by its name at any depth (api_key) or by its form
    (a token, a login in an address), is written as *** wherever settings are written. It is better to give the name of
    an environment variable, as in `token_env: MY_TOKEN`."""
    timeout_s: Annotated[fields.Seconds, MAY_CHANGE] = 60.0
    """Maximum seconds for a call. A longer call is abandoned: its completions get no reward from this function."""
    batch_size: Annotated[fields.Count | Literal["auto", "group"], MAY_CHANGE] = "auto"
    """Completions per call; `group`: all of one prompt; `auto`: the function's own `batch_size`, or 1 without one."""
    sources: list[fields.Name] = field(default_factory=list)
    """Sources of `data.mixture` for whose prompts the function is called. It is called for all held-out prompts, since
    these belong to no source. Default: all sources."""
    isolation: Annotated[Literal["auto", "process", "none"], MAY_CHANGE] = "auto"
    """`process` calls the function in worker processes. `none` calls it in a thread of the rank, for functions that
    hold a GPU; a crash then ends the rank. `auto` is `process`, except for simple built-ins."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_masked("rewards", self.kwargs)
        return self


def reward_name(reward: RewardConfig) -> str:
    """Return the name of a reward in the metrics."""
    return reward.name or fields.function_text(reward.function).rpartition(":")[2].rpartition(".")[2]


def _read_list(rewards: Any) -> Any:
    """Convert text such as `exact_match,mine.py:f`, or null (no section), to a list. Raises UserError for bad YAML."""
    # Text that begins like this was meant as YAML but could not be read.
    refuse(
        isinstance(rewards, str) and rewards.lstrip().startswith(("[", "{")),
        f"rewards {rewards!s:.60} cannot be read as YAML: close every bracket and quote, and give each key once",
    )
    return rewards.split(",") if isinstance(rewards, str) else [] if rewards is None else rewards


def _read_entry(entry: Any) -> Any:
    if isinstance(entry, str):
        return {"function": entry.strip()}
    return {"function": entry} if callable(entry) else entry


def _check_names(rewards: list[RewardConfig]) -> list[RewardConfig]:
    names = [reward_name(reward) for reward in rewards]
    doubles = {name for name in names if names.count(name) > 1}
    refuse(bool(doubles), f"rewards: two are named {', '.join(sorted(doubles))}: set `name` on one of them")
    return rewards


RewardList = Annotated[
    list[Annotated[RewardConfig, BeforeValidator(_read_entry)]],
    BeforeValidator(_read_list),
    AfterValidator(_check_names),
    About(usual=1, in_eval=2, rank=4),
    Field(
        description="Functions, as `exact_match,mine.py:f`; with settings as `[{function: exact_match, weight: 0.5}]`."
    ),
]


@dataclass(frozen=True, config=fields.SECTION)
class ScoringConfig:
    """How reward functions are run."""

    about = About(may_change=True, rank=4)
    workers: fields.Whole = 0
    """Worker processes per rank, which call functions concurrently; 0 means one for each of its cores, from 2 to 8."""
    memory_gb: fields.Gibibytes = 4.0
    """GiB of memory that a worker may allocate. A function that needs more gets a MemoryError."""
    max_failed_frac: Annotated[fields.NotNegative, About(unused_by="eval generate score")] = 0.5
    """Stop the run, with a checkpoint, if a function fails for more than this share of a step's completions."""
    secrets: list[fields.Text] = field(default_factory=list)
    """Environment variables that functions in worker processes may see although their names look like secrets
    (WANDB_API_KEY, HF_TOKEN, *_TOKEN, *_KEY, *_SECRET, *PASSWORD*). Variables that are named by a function's `*_env`
    argument are visible anyway."""
    max_import_s: fields.Seconds = 120.0
    """Maximum time for importing the files of the functions, in seconds."""
    max_wait_s: Annotated[fields.Seconds, About(unused_by="generate score")] = 600.0
    """Seconds to wait for rewards after the last completion of a step. Rewards still missing after that have failed."""
