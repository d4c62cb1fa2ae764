"""The configurations of all commands other than `train`, each composed of the sections that the command uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import partial
from typing import Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.data import DataConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.evaluation import EvalConfig
from hybrid_grpo.config.features import FeatureConfig, feature_sections, with_feature_sections
from hybrid_grpo.config.fields import SECTION, Count, Switch, Text
from hybrid_grpo.config.model import PolicyConfig
from hybrid_grpo.config.preferences import PairEvalConfig, RewardLoopConfig
from hybrid_grpo.config.publishing import PublishOptionsConfig
from hybrid_grpo.config.rewards import RewardList, ScoringConfig, ServeOptionsConfig
from hybrid_grpo.config.rollout import RolloutConfig
from hybrid_grpo.config.run import RunConfig
from hybrid_grpo.config.train import ModelRunConfig, TrainConfig, check_outcome, names_of_rewards
from hybrid_grpo.config.watching import WatchOptionsConfig

_SEED = frozenset({"seed"})
_MODEL = frozenset({"model", "dtype", "attn_implementation", "pickled_weights"})
"""What loading a model takes of `policy`."""


def all_but(section: type[Any], others: str) -> frozenset[str]:
    """The names of a section's settings but for some."""
    return frozenset(section.__dataclass_fields__) - frozenset(others.split())


def in_part(**settings: frozenset[str]) -> Mapping[str, frozenset[str]]:
    """Of sections that a command uses in part, the names of the settings that it uses."""
    return settings


class RecipeReader:
    """A command that reads recipes for training, of which it uses a part.

    Its configuration has the sections that it uses. The rest of a recipe is left aside; given on the command line or in
    Python, a setting that the command does not use is refused (config/composition.py).
    """

    command = ""
    used = in_part()


def refuse_mixture(data: DataConfig, command: str) -> None:
    """Refuse several sources for a command that reads one. Raises UserError."""
    refuse(
        bool(data.mixture),
        f"data.mixture is for train: {command} reads one source: take it out, and set data.path or data.task",
    )


@dataclass(frozen=True, config=SECTION)
class SftLoopConfig:
    """The supervised stage."""

    batch_size: Count = 64
    """Rows of one optimizer step, over all ranks."""
    max_completion_tokens: Count = 512
    """Longest target that is kept; rows with a longer one are dropped and counted."""


@dataclass(frozen=True, config=SECTION)
class SftConfig(ModelRunConfig):
    """Supervised fine-tuning, on the same engine."""

    sft: SftLoopConfig = field(default_factory=SftLoopConfig)

    @model_validator(mode="after")
    def _check_agreement(self) -> SftConfig:
        refuse_mixture(self.data, "sft")
        for name in ("eval_path", "eval_split", "eval_limit"):
            refuse(
                getattr(self.data, name) is not None,
                f"data.{name} is set, but sft does not evaluate: take it out, and use `hybrid-grpo eval` on the result",
            )
        return self


@dataclass(frozen=True, config=SECTION)
class RewardStageConfig(ModelRunConfig):
    """A reward model, trained on pairs of answers."""

    reward: RewardLoopConfig = field(default_factory=RewardLoopConfig)
    eval: PairEvalConfig = field(default_factory=PairEvalConfig)

    @model_validator(mode="after")
    def _check_agreement(self) -> RewardStageConfig:
        data, default = self.data, DataConfig()
        for name, instead in (("max_prompt_tokens", "max_tokens"), ("completion_column", "chosen_column")):
            refuse(
                getattr(data, name) != getattr(default, name),
                f"data.{name} {getattr(data, name)} is not for pairs of texts: take it out, and set reward.{instead}",
            )
        columns = [data.prompt_column, *(getattr(self.reward, f"{name}_column") for name in ("chosen", "rejected"))]
        twice = next((name for name in columns if columns.count(name) > 1), None)
        refuse(
            twice is not None,
            f"reward.chosen_column {columns[1]}, reward.rejected_column {columns[2]} and data.prompt_column"
            f" {columns[0]} are not three columns: change one",
        )
        if data.eval_path is None and data.eval_split is None:
            for setting, value in (("eval.every", self.eval.every), ("data.eval_limit", data.eval_limit)):
                refuse(bool(value), f"{setting} {value} needs held-out pairs: set data.eval_path or data.eval_split")
        return self


@dataclass(frozen=True, config=SECTION)
class EvalOptionsConfig(EvalConfig):
    """Evaluation on held-out prompts, greedy unless a temperature is given; and what becomes of it."""

    against: Text | None = None
    """Model or folder of a run to compare with: it completes the same prompts, and the two are tested in pairs."""
    output: Text | None = None
    """File of JSON lines, written anew, one for each prompt of each set: its completions, their rewards and which are
    right. Default: none."""


@dataclass(frozen=True, config=SECTION)
@partial(with_feature_sections, method="held_out_source")
class EvaluateConfig(RecipeReader):
    """Accuracy of a model on the held-out sets of a recipe, with intervals: that of `policy.model`, else the one that
    the run of `--config RUN/config.yaml` has trained. The numbers go to standard output as one JSON object, and to
    standard error as a table. What only training uses of the recipe is left aside."""

    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How completions end, and who answers their turns; how they are sampled is in `eval`."""
    rewards: RewardList = field(default_factory=list)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    eval: EvalOptionsConfig = field(default_factory=EvalOptionsConfig)

    command = "eval"
    used = in_part(
        run=_SEED,
        policy=_MODEL,
        data=all_but(DataConfig, "mixture limit completion_column shuffle"),
        rollout=all_but(
            RolloutConfig,
            "prompts_per_step num_generations temperature top_p top_k min_p repetition_penalty logit_bias logprobs"
            " keep_cache",
        ),
        scoring=all_but(ScoringConfig, "max_failed_frac"),
        eval=all_but(EvalOptionsConfig, "every best patience"),
    )

    @property
    def reward_names(self) -> list[str]:
        """Names of all rewards, those of functions first, then those of environments."""
        return names_of_rewards(self.rewards, self.rollout)

    @property
    def active_features(self) -> list[FeatureConfig]:
        """The sections of the features that are on and decide how held-out rows are read."""
        sections = (getattr(self, name) for name in feature_sections("held_out_source"))
        return [section for section in sections if section.is_on]

    @model_validator(mode="after")
    def _check_agreement(self) -> EvaluateConfig:
        check_outcome(self.eval, self.reward_names)
        return self


@dataclass(frozen=True, config=SECTION)
class OutputConfig:
    """Where completions go."""

    output: Text = "-"
    """File of JSON lines, written anew; `-` is standard output. Several ranks write a file each: out.0.jsonl, ..."""
    token_logp: Switch = False
    """Also write the tokens of each completion and their log-probabilities, `token_ids` and `token_logp`, which a run
    needs to learn from them with importance weights."""


@dataclass(frozen=True, config=SECTION)
class GenerateConfig(RecipeReader):
    """Completions of prompts, one JSON object a line, sampled as step 0 of a training run would sample them. Takes the
    recipe of a training run, and leaves aside what only training uses."""

    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(over_long="refuse"))
    """The prompts are those of `path` and `split`. Without a path and a task, or with `-`, they come from standard
    input: one a line, as text or as a JSON object with the columns of a data set."""
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(num_generations=1))
    """How completions are sampled; temperature 0 takes the most probable tokens."""
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    """Worker processes, which call tools and environments."""
    generate: OutputConfig = field(default_factory=OutputConfig)

    command = "generate"
    used = in_part(
        run=_SEED,
        policy=_MODEL,
        data=all_but(DataConfig, "eval_path eval_split eval_limit completion_column shuffle"),
        rollout=all_but(RolloutConfig, "prompts_per_step keep_cache"),
        scoring=frozenset({"workers", "memory_gb", "secrets", "max_import_s"}),
    )

    @property
    def reads_stdin(self) -> bool:
        """Whether prompts come from standard input."""
        path = self.data.path
        return isinstance(path, str) and (path == "-" or (path == "" and self.data.task is None))

    @model_validator(mode="after")
    def _check_agreement(self) -> GenerateConfig:
        refuse_mixture(self.data, "generate")
        rollout = self.rollout
        refuse(
            rollout.temperature == 0 and rollout.num_generations > 1,
            f"rollout.temperature 0 has one completion for a prompt, and rollout.num_generations is"
            f" {rollout.num_generations}: set it to 1, or the temperature above 0",
        )
        refuse(
            self.reads_stdin and self.data.task is not None,
            f"data.path - is prompts from standard input, and data.task {self.data.task} reads rows: take out one of"
            " them",
        )
        return self


@dataclass(frozen=True, config=SECTION)
class ChatOptionsConfig:
    """The conversation."""

    system: str | None = None
    """System prompt, for models with a chat template. Default: that of `data.system_prompt`."""
    adapter: Text | None = None
    """Folder of an adapter in peft's format, merged into `policy.model`. Default: none."""


@dataclass(frozen=True, config=SECTION)
class ChatConfig(RecipeReader):
    """A conversation in the terminal: a line is a message, and the answer is shown while it is sampled. MODEL is the
    folder or hub name of a model, the folder of a run, or that of an adapter (its base model is the one that it names,
    or `policy.model`). For a run the settings start from the run's own. Lines can also come from a pipe."""

    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    chat: ChatOptionsConfig = field(default_factory=ChatOptionsConfig)

    command = "chat"
    used = in_part(
        run=_SEED,
        policy=_MODEL,
        data=frozenset({"system_prompt", "chat_template", "chat_template_kwargs"}),
        rollout=all_but(
            RolloutConfig,
            "prompts_per_step num_generations logprobs max_slots keep_cache tools environment tool_format max_turns"
            " max_tool_tokens tool_timeout_s max_turn_calls environment_processes keep_history user user_model"
            " user_prompt user_temperature user_stop",
        ),
    )


@dataclass(frozen=True, config=SECTION)
class PlanOptionsConfig:
    """Where the planned run would be."""

    world_size: Count | None = None
    """Ranks. Default: as many as run this command."""
    gpu: Literal["rtx4090", "a100-40gb", "a100-80gb", "l40s", "h100", "h200", "b200"] | None = None
    """Plan for an empty GPU of this kind, by its data sheet. Default: the device that is here."""


@dataclass(frozen=True, config=SECTION)
class PlanConfig(TrainConfig):
    """Memory and time of a training run, by its recipe, without loading weights."""

    plan: PlanOptionsConfig = field(default_factory=PlanOptionsConfig)


@dataclass(frozen=True, config=SECTION)
class ScoreOptionsConfig:
    """Where rewards go, and which of a run's steps are scored."""

    output: Text = "-"
    """File of JSON lines, written anew; `-` is standard output."""
    steps: str | None = None
    """Steps of a run to score, as in `100-200`, `100-`, `-200` or `100`. Default: all that were saved."""


@dataclass(frozen=True, config=SECTION)
class ScoreConfig(RecipeReader):
    """Try reward functions on completions that exist already, without a model. FILE_OR_RUN is a file of rows with
    completions (anything that `data.path` takes, or `-` for JSON lines from standard input), or the folder of a run.
    A row of a file has a prompt, the column of `data.completion_column` with a text, or one with an `s` after that
    name with a list of texts, and columns for the functions; any recipe can be given. For a run, the settings start
    from the run's own, and every line also has the rewards that the run's own functions gave."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The tokenizer, for functions that look at tokens."""
    data: DataConfig = field(default_factory=DataConfig)
    """How the rows of a file are read."""
    rewards: RewardList = field(default_factory=list)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    """From which reward on a completion is right."""
    score: ScoreOptionsConfig = field(default_factory=ScoreOptionsConfig)
    """Where rewards go, and which of a run's steps are scored."""

    command = "score"
    used = in_part(
        policy=frozenset({"model"}),
        data=frozenset({"task", "subset", "split", "limit", "prompt_column", "completion_column", "system_prompt"}),
        scoring=all_but(ScoringConfig, "max_failed_frac max_wait_s"),
        eval=frozenset({"threshold"}),
    )


@dataclass(frozen=True, config=SECTION)
class ReplayOptionsConfig:
    """What is made again, and where the result goes."""

    completions: Literal["again", "saved"] = "again"
    """`again` samples them, and tools are called; `saved` takes those that the run has saved, as for tools whose
    answers have changed."""
    rewards: Literal["again", "saved"] = "again"
    """`again` calls the reward functions; `saved` uses the rewards that they returned in the run."""
    out: Text | None = None
    """Folder for the result, which replaces an earlier result of this step. Default: `replay` in the run's folder."""


@dataclass(frozen=True, config=SECTION)
class ReplayConfig(TrainConfig):
    """Repeat step STEP of the run in the folder RUN from the checkpoint before it, compare the result with what the run
    saved, and show token by token what the loss saw. The settings are the run's own. Change those of `grpo`, `rewards`
    and `scoring`, for this step alone, to see what difference they would have made. The run's files are only read."""

    replay: ReplayOptionsConfig = field(default_factory=ReplayOptionsConfig)

    @model_validator(mode="after")
    def _check_replay(self) -> ReplayConfig:
        refuse(
            bool(self.rollout.environment) and (self.replay.completions, self.replay.rewards) == ("saved", "again"),
            "replay.completions saved brings no environments, which rollout.environment takes rewards from: set"
            " replay.rewards to saved, or replay.completions to again",
        )
        return self


@dataclass(frozen=True, config=SECTION)
class PublishConfig:
    """Publish the trained model of RUN, the folder of a run of any stage, with a model card that is made from the run:
    evaluation, curves, data, objective, versions, and the settings to repeat it."""

    publish: PublishOptionsConfig = field(default_factory=PublishOptionsConfig)


@dataclass(frozen=True, config=SECTION)
class ServeRewardConfig(RecipeReader):
    """Serve reward functions to other machines, by OpenRLHF's convention. Takes the recipe of a training run and serves
    its rewards."""

    rewards: RewardList = field(default_factory=list)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    serve: ServeOptionsConfig = field(default_factory=ServeOptionsConfig)

    command = "serve-reward"


@dataclass(frozen=True, config=SECTION)
class WatchConfig:
    """A page in the browser that shows runs, also while they train. RUNS are run folders, or folders that contain run
    folders; runs added to these later are shown too. Files are only read, never changed."""

    watch: WatchOptionsConfig = field(default_factory=WatchOptionsConfig)
