"""Settings of the run as a whole: its folder, length, checkpoints and logs."""

import time
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.about import MAY_CHANGE, OF_PLACE, About
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import SECTION, Count, Duration, Name, NotNegative, Place, Positive, Switch, Text, Whole

NAMED_BY_TIME = "{}-" + "[0-9]" * 8 + "-" + "[0-9]" * 6


def unused_name(folder: Path, command: str) -> str:
    """Return the name of a run that begins now: its command and the time, of which there is no run in `folder` yet."""
    while (folder / (name := time.strftime(f"{command}-%Y%m%d-%H%M%S"))).exists():
        time.sleep(0.1)
    return name


@dataclass(frozen=True, config=SECTION)
class RunConfig:
    """The run as a whole: where it writes, how long it lasts, how it resumes."""

    about = About(unused_by="eval generate chat plan")
    name: Annotated[Name | None, About(usual=2), OF_PLACE] = None
    """Name of the run; its folder is DIR/NAME. Default: the command and the time."""
    dir: Annotated[Place, OF_PLACE] = "runs"
    """Folder that holds the runs."""
    seed: Annotated[Whole, About(usual=3, in_eval=6, unused_by="plan", rank=10)] = 0
    """Seed of the data order and of every sampled token."""
    steps: Annotated[Count, About(usual=2, rank=10), MAY_CHANGE] = 100
    """Steps to train: rollouts for `train`, optimizer steps for `sft` and `reward`."""
    resume: Annotated[Place, About(usual=3), OF_PLACE] = "never"
    """Checkpoint to continue from. `auto` is the newest complete one of this run (without a name, of the command's
    newest unfinished one without), or a new run if there is none. Any run's checkpoint can also be given by its folder.
    """
    allow_changes: Annotated[Switch, MAY_CHANGE] = False
    """Continue from a checkpoint even if settings that affect learning, or the data, have changed since."""
    stop_after: Annotated[Duration | None, MAY_CHANGE] = None
    """Time after which the run saves a checkpoint and ends with status 75: 90m, 11h30m, 1-00:00:00. Default: none."""
    grace_s: Annotated[Positive | None, MAY_CHANGE] = None
    """Seconds to save a checkpoint after a run is asked to stop; a rank that takes longer is killed. Default: 20 s plus
    twice the time that the last checkpoint took or, before the first one, plus 10 s for each GB that a rank writes."""
    stall_minutes: Annotated[NotNegative, MAY_CHANGE] = 30.0
    """If no rank makes progress for this long, the run ends and reports which rank is behind; 0 waits forever."""


@dataclass(frozen=True, config=SECTION)
class CheckpointConfig:
    """When checkpoints to resume from are written, and how many are kept."""

    about = About(unused_by="plan", may_change=True, is_place=True)
    every_minutes: Annotated[NotNegative, About(usual=6)] = 15.0
    """Minutes between checkpoints; 0 ignores time. Unless this and `every` are both 0, a checkpoint is also written
    before the first step and after the last."""
    every: Whole = 0
    """Steps between checkpoints; 0 ignores steps."""
    keep: Count = 2
    """How many of the newest checkpoints are kept."""
    asynchronous: Switch = True
    """Write checkpoints while training continues, from a copy in host memory. The first and the last one of a run are
    waited for, and so are all if memory is short."""
    on_failure: Literal["say", "stop"] = "say"
    """What to do if a checkpoint cannot be written: report it and continue, or stop the run. The previous checkpoint is
    kept. A run that cannot write its first checkpoint stops."""

    @property
    def is_on(self) -> bool:
        return bool(self.every or self.every_minutes)

    @property
    def copies(self) -> bool:
        """Whether checkpoints are written from a copy."""
        return self.asynchronous and self.is_on


@dataclass(frozen=True, config=SECTION)
class LogConfig:
    """What is shown and written during the run."""

    about = About(unused_by="plan", may_change=True, is_place=True)
    wandb: Annotated[Literal["auto", "online", "offline", "disabled"], About(usual=6)] = "auto"
    """`auto` is online if an account is configured, else offline. A failure of wandb does not affect the run."""
    wandb_project: Text = "hybrid_grpo"
    """Project on wandb."""
    wandb_entity: Text | None = None
    """Team or user on wandb. Default: the default of the account."""
    group: Text | None = None
    """Name shared by runs that belong together, such as the seeds of one setting. Default: none."""
    tags: list[Text] = field(default_factory=list)
    """Words by which runs can be found."""
    rollouts_every: Whole = 1
    """Steps between rollouts that are written to rollouts/ and sampled for wandb; 0 writes none."""
    tokens: Switch = True
    """Also write the tokens of these rollouts, with their texts, log-probabilities and advantages, as parquet."""
    histograms_every: Whole = 10
    """Steps between histograms of rewards, lengths and advantages for wandb, of written rollouts; 0 makes none."""
    details: Switch = True
    """Write details.jsonl: the stages of each step on every rank."""
    profile: Count | list[Count] = field(default_factory=list)
    """Step, or list of steps, that torch's profiler traces. The run's profile/ gets each rank's trace, and a table of
    each stage's slowest operations. A profiled step takes longer. Default: none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(
            len(set(self.profiled)) < len(self.profiled), f"log.profile {self.profile} names a step twice: remove one"
        )
        return self

    @property
    def profiled(self) -> list[int]:
        return self.profile if isinstance(self.profile, list) else [self.profile]
