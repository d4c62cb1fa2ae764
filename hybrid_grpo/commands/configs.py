"""The configurations of the commands beside training, each composed of the sections that the command uses."""

import re
from dataclasses import field
from typing import Annotated, Any, Literal, Self, get_args

from annotated_types import Le
from pydantic import BeforeValidator, model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.commands import RecipeReader, refuse_mixture
from hybrid_grpo.config.data import DataConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.evaluation import EvalConfig
from hybrid_grpo.config.fields import SECTION, Count, Place, Switch, Text, Whole
from hybrid_grpo.config.model import PolicyConfig
from hybrid_grpo.config.rewards import RewardList, ScoringConfig
from hybrid_grpo.config.rollout import RolloutConfig
from hybrid_grpo.config.run import RunConfig
from hybrid_grpo.config.train import TrainConfig, check_outcome, names_of_rewards
from hybrid_grpo.records.publishing.options import PublishOptionsConfig

_Gpu = Literal["rtx3090", "rtx4090", "rtx5090", "a10g", "l40s", "a100-40gb", "a100-80gb", "h100", "h200", "b200"]


def _gpu_name(name: Any) -> Any:
    """Return the name that this package gives to a GPU, however it is written; unchanged if there is none."""
    letters = re.sub(r"nvidia|geforce|tesla|pcie|sxm\d?|[^a-z0-9]", "", name.lower()) if isinstance(name, str) else ""
    short = {known.replace("-", "").removeprefix("rtx"): known for known in get_args(_Gpu)}
    return next((short[known] for known in short if letters.removeprefix("rtx").startswith(known)), name)


@dataclass(frozen=True, config=SECTION)
class EvalOptionsConfig(EvalConfig):
    """Evaluation on held-out prompts, greedy unless a temperature is given, and where its results are written."""

    against: Text | None = None
    """Model, or folder of a run, to compare with. It completes the same prompts, and a paired test compares the two."""
    output: Place | None = None
    """File of JSON lines; an existing file is replaced. Each prompt of each set gets a line with its completions, their
    rewards, and which of them are right. Default: none."""


@dataclass(frozen=True, config=SECTION)
class EvaluateConfig(RecipeReader):
    """Measure a model's accuracy on the held-out sets of a recipe, with intervals. The model is `policy.model` or, with
    `--config RUN/config.yaml`, the one that the run trained, unless `--policy.model` is given. Results go to standard
    output as one JSON object, and to standard error as a table. Settings that only training uses are ignored."""

    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How completions end, and what answers their turns. How they are sampled is set in `eval`."""
    rewards: RewardList = field(default_factory=list)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    eval: EvalOptionsConfig = field(default_factory=EvalOptionsConfig)

    command = "eval"

    @property
    def reward_names(self) -> list[str]:
        return names_of_rewards(self.rewards, self.rollout)

    @model_validator(mode="after")
    def _check_agreement(self) -> Self:
        check_outcome(self.eval, self.reward_names)
        return self


@dataclass(frozen=True, config=SECTION)
class OutputConfig:
    """Where completions are written."""

    output: Place = "-"
    """File of JSON lines, which is replaced; `-` is standard output. Several ranks write one each: out.0.jsonl, ..."""
    token_logp: Switch = False
    """Also write each completion's tokens and their log-probabilities, as `token_ids` and `token_logp`. A run needs
    them to learn from the completions with importance weights."""


@dataclass(frozen=True, config=SECTION)
class GenerateConfig(RecipeReader):
    """Complete prompts, sampling as step 0 of a training run would, and write one JSON object per line. The command
    takes the recipe of a training run and ignores settings that only training uses."""

    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(over_long="refuse"))
    """The prompts are those of `path` and `split`. With neither a path nor a task, or with the path `-`, they come from
    standard input: one per line, as text or as a JSON object with the columns of a data set."""
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(num_generations=1))
    """How completions are sampled; temperature 0 takes the most probable tokens."""
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    """The worker processes that call tools and environments."""
    generate: OutputConfig = field(default_factory=OutputConfig)

    command = "generate"

    @property
    def reads_stdin(self) -> bool:
        path = self.data.path
        return isinstance(path, str) and (path == "-" or (path == "" and self.data.task is None))

    @model_validator(mode="after")
    def _check_agreement(self) -> Self:
        refuse_mixture(self.data, "generate")
        rollout = self.rollout
        refuse(
            rollout.temperature == 0 and rollout.num_generations > 1,
            f"rollout.num_generations {rollout.num_generations}: at temperature 0 all completions of a prompt are the"
            " same: set it to 1, or rollout.temperature above 0",
        )
        refuse(
            self.reads_stdin and self.data.task is not None,
            f"data.path - reads prompts from standard input, but data.task {self.data.task} makes them: remove one",
        )
        return self


@dataclass(frozen=True, config=SECTION)
class ChatOptionsConfig:
    """The system prompt for the conversation."""

    system: str | None = None
    """System prompt, for models with a chat template. Default: `data.system_prompt`."""


@dataclass(frozen=True, config=SECTION)
class ChatConfig(RecipeReader):
    """Talk to a model in the terminal: each line is a message, whose answer is shown while it is sampled. MODEL is the
    folder or hub name of a model, or the folder of an adapter or of a run, whose settings are then the defaults. Lines
    may come from a pipe."""

    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    chat: ChatOptionsConfig = field(default_factory=ChatOptionsConfig)

    command = "chat"


@dataclass(frozen=True, config=SECTION)
class PlanOptionsConfig:
    """The ranks and the GPU to plan for."""

    world_size: Count | None = None
    """Number of ranks. Default: the number of ranks that run this command."""
    gpu: Annotated[_Gpu, BeforeValidator(_gpu_name)] | None = None
    """Plan for an otherwise unused GPU of this kind, based on its data sheet; also in other spellings, such as `NVIDIA
    H100 80GB HBM3`. Default: the device of this machine."""


@dataclass(frozen=True, config=SECTION)
class PlanConfig(TrainConfig):
    """Estimate the memory and time of a training run from its recipe, without loading weights."""

    plan: PlanOptionsConfig = field(default_factory=PlanOptionsConfig)

    command = "plan"

    @property
    def needs_weights(self) -> bool:
        return False


@dataclass(frozen=True, config=SECTION)
class ScoreOptionsConfig:
    """Where rewards are written, and which of a run's steps are scored."""

    output: Place = "-"
    """File of JSON lines, which is replaced; `-` is standard output, of which a terminal shows 20 lines."""
    steps: str | None = None
    """Steps of a run to score, as in `100-200`, `100-`, `-200` or `100`. Default: all that were saved."""


@dataclass(frozen=True, config=SECTION)
class ScoreConfig(RecipeReader):
    """Try reward functions on existing completions, without a model. FILE_OR_RUN is a file of rows with completions
    (anything that `data.path` takes, or `-` for JSON lines from standard input), or the folder of a run. A row of a
    file has a prompt, columns for the functions, and a completion: a text in the column that `data.completion_column`
    names, or a list of texts in the column of that name plus `s`. Any recipe can be given. For a run, the settings
    default to the run's own, and every line of output also has the rewards that the run recorded."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The tokenizer, for functions that look at tokens."""
    data: DataConfig = field(default_factory=DataConfig)
    """How the rows of a file are read."""
    rewards: RewardList = field(default_factory=list)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    """The threshold (`eval.threshold`): a completion whose reward is at least this counts as right."""
    score: ScoreOptionsConfig = field(default_factory=ScoreOptionsConfig)

    command = "score"


@dataclass(frozen=True, config=SECTION)
class PublishConfig:
    """Publish the trained model of RUN, the folder of a run of any stage, with a model card that is made from the run:
    evaluation, curves, data, objective, versions, and the settings that reproduce it."""

    publish: PublishOptionsConfig = field(default_factory=PublishOptionsConfig)


@dataclass(frozen=True, config=SECTION)
class WatchOptionsConfig:
    """Where the page is served."""

    port: Annotated[Whole, Le(65535)] = 8170
    """Port to listen on, reachable from this machine only; 0 selects a free one."""


@dataclass(frozen=True, config=SECTION)
class WatchConfig:
    """Show runs on a page in the browser, even while they train. RUNS are run folders, or folders that contain run
    folders; runs that are added to such a folder later are shown too. Files are only read, never changed."""

    watch: WatchOptionsConfig = field(default_factory=WatchOptionsConfig)
