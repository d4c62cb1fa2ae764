"""Every option, one dataclass per owner, read from YAML and dotted command-line overrides.

Parsing never imports torch: a mistake costs the user a moment, not a model load. Nothing changes a
configuration after it was parsed. What can be derived (accumulation, micro-batches) is not asked for.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, set_dumper, set_parsing_settings

from hybrid_grpo.errors import UserError

set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole: where it writes, how long it lasts, how it repeats."""

    name: str = "run"
    """Name of the run; its folder is DIR/NAME."""
    dir: str = "runs"
    """Folder that holds the runs."""
    seed: int = 0
    """Seed of the data order and of every sampled token."""
    steps: int = 100
    """Steps to train: rollouts for `train`, optimizer steps for `sft`."""
    resume: Literal["never", "auto"] = "never"
    """`auto` goes on from the newest checkpoint of this run, or starts where there is none."""


@dataclass(frozen=True)
class PolicyConfig:
    """The model that is trained and its optimizer."""

    model: str = ""
    """Folder or hub name of the starting model and its tokenizer."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights in forward and backward; the optimizer always keeps float32 masters."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention of the training forward (flash_attention_2 needs the extra `flash`)."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in backward instead of keeping them."""
    lr: float = 1e-6
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; linear and cosine end at 0 with the last step."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW moment decays."""
    max_grad_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down."""
    micro_batch_tokens: int = 16384
    """Padded tokens of one forward and backward, per rank; a longer row goes alone."""


@dataclass(frozen=True)
class EngineConfig:
    """The DeepSpeed engine."""

    zero_stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage of the policy: 3 shards weights, gradients and optimizer over the ranks."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory (ZeRO stage 1 or higher)."""
    adam: Literal["auto", "torch", "deepspeed"] = "auto"
    """AdamW kernels: `deepspeed` compiles its own on first use; `auto` takes them for GPU runs that offload."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed configuration merged over the one built here, section by section."""


@dataclass(frozen=True)
class DataConfig:
    """Prompts: where they come from and how they become tokens."""

    path: str = ""
    """JSONL or parquet file, folder of a saved dataset, or hub name."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "train"
    """Split to train on, where the source has splits."""
    eval_path: str | None = None
    """Source of the held-out prompts; not given: the same as `path`."""
    eval_split: str | None = None
    """Split to evaluate on; with neither this nor `eval_path` there is no evaluation."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    completion_column: str = "completion"
    """Column with the target text (`sft` only)."""
    system_prompt: str | None = None
    """System message put before every prompt; makes text prompts into chats."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto` applies the tokenizer's template to message lists, `always` also to text (as a user message)."""
    max_prompt_tokens: int = 512
    """Longest prompt that is kept."""
    over_long: Literal["drop", "refuse"] = "drop"
    """What to do with longer prompts: drop and count them, or stop."""
    shuffle: bool = True
    """Draw prompts in a seeded random order, a new one every epoch."""
    limit: int | None = None
    """Read only the first rows of the training split."""
    eval_limit: int | None = None
    """Read only the first rows of the evaluation split."""


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled."""

    prompts_per_step: int = 32
    """Prompts of one rollout, over all ranks (P)."""
    num_generations: int = 8
    """Completions per prompt (G), the group that advantages are relative to."""
    max_completion_tokens: int = 512
    """Longest completion."""
    temperature: float = 1.0
    """Softmax temperature, of sampling and of every log-probability in the loss."""
    top_p: float = 1.0
    """Nucleus: smallest set of tokens with at least this probability; 1 keeps all."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    stop_ids: list[int] = field(default_factory=list)
    """Token ids that end a completion, beside the model's own end-of-sequence ids."""
    max_slots: int = 256
    """Completions decoded at the same time on one rank."""
    prefill_tokens: int = 16384
    """Padded prompt tokens of one prefill forward."""


@dataclass(frozen=True)
class GrpoConfig:
    """The objective."""

    loss_type: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """Average of the token losses: over all tokens (dapo), per completion then over completions (grpo), or by the
    constant B * max_completion_tokens (dr_grpo)."""
    scale_rewards: Literal["group", "none"] = "group"
    """Divide the centred rewards of a group by their standard deviation, or do not (Dr. GRPO)."""
    epsilon_low: float = 0.2
    """The ratio is clipped from below at 1 - epsilon_low."""
    epsilon_high: float = 0.2
    """The ratio is clipped from above at 1 + epsilon_high (0.28 in DAPO)."""
    beta: float = 0.0
    """Weight of the KL to the reference in the loss; 0 loads no reference."""
    num_iterations: int = 1
    """Passes over one rollout (mu of DeepSeekMath)."""
    num_minibatches: int = 1
    """Optimizer steps per pass."""


@dataclass(frozen=True)
class RewardConfig:
    """One reward function."""

    function: str
    """`exact_match` or another built-in, `path/to/file.py:function`, or `package.module:function`."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    name: str | None = None
    """Name in the metrics; not given: the function's own."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Fixed keyword arguments for the function."""


@dataclass(frozen=True)
class EvalConfig:
    """Greedy evaluation on the held-out prompts."""

    every: int = 0
    """Steps between evaluations; 0 evaluates before the first and after the last step only."""
    name: str = "heldout"
    """Name of the set in the metrics: eval/NAME/accuracy."""
    outcome: str | None = None
    """Name of the reward that tells right from wrong; not given: the first one."""
    threshold: float = 1.0
    """A completion is right when its outcome reward is at least this."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is written to resume from."""

    every: int = 0
    """Steps between checkpoints; 0 writes none (the trained model is always exported at the end)."""
    keep: int = 2
    """Newest checkpoints that are kept."""


@dataclass(frozen=True)
class LogConfig:
    """What is shown and written while it runs."""

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online where an account is configured, else offline."""
    wandb_project: str = "hybrid_grpo"
    """Project on wandb."""
    rollouts_every: int = 1
    """Steps between rollouts written to rollouts/ and to the wandb table; 0 writes none."""
    parity_alarm: float = 0.05
    """Warn when sampler and training forward differ by more than this, on average, in log-probability."""


@dataclass(frozen=True)
class SftLoopConfig:
    """The supervised stage."""

    batch_size: int = 64
    """Rows of one optimizer step, over all ranks."""
    max_completion_tokens: int = 512
    """Longest target that is kept; rows beyond it are dropped and counted."""


@dataclass(frozen=True)
class TrainConfig:
    """GRPO training."""

    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    rewards: list[RewardConfig] = field(default_factory=list)
    """Reward functions: `[{function: exact_match, weight: 1.0}, ...]`."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True)
class SftConfig:
    """Supervised fine-tuning, on the same engine."""

    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sft: SftLoopConfig = field(default_factory=SftLoopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True)
class BatchPlan:
    """The batch equation of a GRPO step, derived from the configuration and the number of ranks."""

    world_size: int
    prompts_per_rank: int
    num_generations: int
    num_minibatches: int
    num_iterations: int
    micro_batch_tokens: int

    @property
    def rows_per_minibatch(self) -> int:
        """Completions behind one optimizer step, over all ranks."""
        return self.world_size * self.prompts_per_rank * self.num_generations // self.num_minibatches

    def __str__(self) -> str:
        rows = self.world_size * self.prompts_per_rank * self.num_generations
        steps = self.num_iterations * self.num_minibatches
        return (
            f"{self.world_size} ranks x {self.prompts_per_rank} prompts x {self.num_generations} completions"
            f" = {rows} rows a rollout; {self.num_iterations} iterations x {self.num_minibatches} minibatches"
            f" = {steps} optimizer steps of {self.rows_per_minibatch} rows,"
            f" in micro-batches of at most {self.micro_batch_tokens} tokens a rank"
        )


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise UserError(message)


def _nearest_multiple(value: int, step: int) -> int:
    return max(step, round(value / step) * step)


def _refuse_indivisible(name: str, value: int, divisor: int, why: str) -> None:
    _refuse(
        value % divisor != 0,
        f"{name} {value} does not divide by {why} = {divisor}: the nearest value is"
        f" {_nearest_multiple(value, divisor)}",
    )


def batch_plan(config: TrainConfig, world_size: int) -> BatchPlan:
    """The batch equation; refuses one that does not come out even, with the nearest value that does."""
    rollout, grpo = config.rollout, config.grpo
    shards = world_size * grpo.num_minibatches
    _refuse_indivisible("rollout.prompts_per_step", rollout.prompts_per_step, shards, "ranks x grpo.num_minibatches")
    return BatchPlan(
        world_size=world_size,
        prompts_per_rank=rollout.prompts_per_step // world_size,
        num_generations=rollout.num_generations,
        num_minibatches=grpo.num_minibatches,
        num_iterations=grpo.num_iterations,
        micro_batch_tokens=config.policy.micro_batch_tokens,
    )


_MAY_BE_EMPTY_TEXT = {"policy.model", "data.path", "data.eval_path", "data.system_prompt", "run.name", "eval.outcome"}
"""Empty text means something, or is refused in words of its own."""
_POSITIVE = {
    "run.steps", "policy.lr", "policy.max_grad_norm", "policy.micro_batch_tokens", "data.max_prompt_tokens",
    "rollout.prompts_per_step", "rollout.max_completion_tokens", "rollout.max_slots", "rollout.prefill_tokens",
    "grpo.num_iterations", "grpo.num_minibatches", "grpo.epsilon_low", "grpo.epsilon_high", "checkpoint.keep",
    "sft.batch_size", "sft.max_completion_tokens", "log.parity_alarm",
}  # fmt: skip
_NOT_NEGATIVE = {
    "run.seed", "policy.warmup_steps", "policy.weight_decay", "rollout.temperature", "rollout.top_k", "grpo.beta",
    "eval.every", "checkpoint.every", "log.rollouts_every",
}  # fmt: skip


def _check_common(config: TrainConfig | SftConfig) -> None:
    for section in dataclasses.fields(config):
        for name, value in vars(getattr(config, section.name)).items() if section.name != "rewards" else ():
            path = f"{section.name}.{name}"
            _refuse(path in _POSITIVE and value <= 0, f"{path} {value} must be greater than 0")
            _refuse(path in _NOT_NEGATIVE and value < 0, f"{path} {value} must be 0 or greater")
            _refuse(value == "" and path not in _MAY_BE_EMPTY_TEXT, f"{path} is empty: give a value or take it out")
    _check_model(config.policy.model)
    _check_source("data.path", config.data.path)
    if config.data.eval_path is not None:
        _check_source("data.eval_path", config.data.eval_path)
    _check_deepspeed(config.engine.deepspeed)
    for name, limit in (("data.limit", config.data.limit), ("data.eval_limit", config.data.eval_limit)):
        _refuse(limit is not None and limit < 1, f"{name} {limit} must be 1 or greater")
    for beta in config.policy.betas:
        _refuse(not 0 <= beta < 1, f"policy.betas {list(config.policy.betas)} must be in [0, 1)")
    _refuse(
        config.engine.offload_optimizer and config.engine.zero_stage == 0,
        "engine.offload_optimizer needs engine.zero_stage 1 or higher: set engine.zero_stage to 1, 2 or 3",
    )
    _check_name("run.name", config.run.name, "it names a folder")
    _check_run_dir(config.run.dir)


def _check_name(setting: str, name: str, why: str) -> None:
    _refuse(
        not re.fullmatch(r"[\w.][\w.\-]{0,127}", name) or name.strip(".") == "",
        f"{setting} {name!r} must be at most 128 letters, digits, '.', '_' or '-', without '-' in front: {why}",
    )


def _check_run_dir(folder: str) -> None:
    _refuse(folder.startswith("~"), f"run.dir {folder}: ~ is only known to shells: write the whole path")
    above = next((path for path in (Path(folder), *Path(folder).parents) if path.exists()), None)
    _refuse(above is not None and not above.is_dir(), f"run.dir {folder}: {above} is a file, not a folder")


def _check_model(model: str) -> None:
    _refuse(not model, "policy.model is not set: give a model folder or a hub name")
    if _looks_like_path(model):
        _refuse(Path(model).is_file(), f"policy.model {model} is a file: give the folder of a model or a hub name")
        _refuse(not Path(model).is_dir(), f"policy.model {model}: there is no such folder")
        _refuse(
            not (Path(model) / "config.json").is_file(),
            f"policy.model {model} is not a model folder: it has no config.json",
        )


def _check_source(name: str, source: str) -> None:
    _refuse(not source, f"{name} is not set: give a JSONL or parquet file, a dataset folder or a hub name")
    if _looks_like_path(source):
        _refuse(not Path(source).exists(), f"{name} {source}: there is no such file or folder")
        _refuse(Path(source).is_file() and Path(source).stat().st_size == 0, f"{name} {source} is empty")


def _looks_like_path(name: str) -> bool:
    """A hub name is `name` or `owner/name`; anything that exists, or could not be one, is a path."""
    return (
        os.path.exists(name)
        or not re.fullmatch(r"[\w\-][\w.\-]*(/[\w.\-]+)?", name)
        or bool(re.search(r"\.(jsonl?|parquet|csv|txt|yaml)$", name))
    )


_OWNED = {
    "zero_optimization.stage": "set by engine.zero_stage",
    "bf16.enabled": "set by policy.dtype",
    "fp16.enabled": "set by policy.dtype",
    "gradient_clipping": "set by policy.max_grad_norm",
    "gradient_accumulation_steps": "derived from policy.micro_batch_tokens",
    "train_batch_size": "derived from the batch settings",
    "train_micro_batch_size_per_gpu": "derived from policy.micro_batch_tokens",
    "managed_gradient_accumulation": "derived from policy.micro_batch_tokens",
    "hybrid_engine.enabled": "always on, since generation depends on it",
    "optimizer.params.lr": "set by policy.lr",
    "optimizer.params.betas": "set by policy.betas",
    "optimizer.params.weight_decay": "set by policy.weight_decay",
    "scheduler": "set by policy.lr_schedule",
}
"""DeepSpeed settings that follow from ours."""


def _check_deepspeed(overrides: dict[str, Any]) -> None:
    for owned, origin in _OWNED.items():
        section, path = overrides, "engine.deepspeed"
        *above, last = owned.split(".")
        for key in above:
            section, path = section.get(key, {}), f"{path}.{key}"
            _refuse(not isinstance(section, dict), f"{path} {section!r} must be a section of DeepSpeed's settings")
        _refuse(last in section, f"engine.deepspeed.{owned} is {origin}: take it out of engine.deepspeed")


def check_sft(config: SftConfig, world_size: int) -> None:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        UserError: one line that names the settings and the way out.
    """
    _check_common(config)
    _refuse_indivisible("sft.batch_size", config.sft.batch_size, world_size, "ranks")
    for name in ("eval_path", "eval_split", "eval_limit"):
        _refuse(
            getattr(config.data, name) is not None,
            f"data.{name} is set, but sft does not evaluate: take it out, and use `hybrid-grpo eval` on the result",
        )


def check_train(config: TrainConfig, world_size: int) -> BatchPlan:
    """Refuse what cannot work, before anything is loaded; return the batch equation.

    Raises:
        UserError: one line that names the settings and the way out.
    """
    _check_common(config)
    rollout, grpo = config.rollout, config.grpo
    _refuse(
        rollout.num_generations < 2,
        f"rollout.num_generations {rollout.num_generations} makes no group: advantages need 2 or more",
    )
    _refuse(not 0 < rollout.top_p <= 1, f"rollout.top_p {rollout.top_p} must be in (0, 1]")
    _refuse(
        rollout.temperature == 0,
        "rollout.temperature 0 samples the same completion for a whole group: give a value above 0",
    )
    _refuse(grpo.epsilon_low >= 1, f"grpo.epsilon_low {grpo.epsilon_low} must be below 1: the ratio stays positive")
    _refuse(not config.rewards, "rewards is empty: give at least one, as in --rewards '[{function: exact_match}]'")
    for index, reward in enumerate(config.rewards):
        _refuse(not reward.function, f"rewards[{index}].function is empty: name a built-in or a function")
        if reward.name is not None:
            _check_name(f"rewards[{index}].name", reward.name, "it names a metric")
    names = [reward_name(reward) for reward in config.rewards]
    doubles = {name for name in names if names.count(name) > 1}
    _refuse(bool(doubles), f"rewards: two are named {', '.join(sorted(doubles))}: set `name` on one of them")
    outcome = config.eval.outcome
    _refuse(
        outcome is not None and outcome not in names,
        f"eval.outcome {outcome!r} is not a reward of this run{_did_you_mean(outcome or '', names)}",
    )
    _check_name("eval.name", config.eval.name, "it names a metric")
    if config.data.eval_path is None and config.data.eval_split is None:
        for setting, value in (("eval.every", config.eval.every), ("data.eval_limit", config.data.eval_limit)):
            _refuse(bool(value), f"{setting} {value} needs held-out prompts: set data.eval_path or data.eval_split")
    for token in rollout.stop_ids:
        _refuse(token < 0, f"rollout.stop_ids {rollout.stop_ids}: a token id is 0 or greater")
    return batch_plan(config, world_size)


def reward_name(reward: RewardConfig) -> str:
    """The name of a reward in the metrics."""
    return reward.name or reward.function.rpartition(":")[2].rpartition(".")[2]


ConfigT = TypeVar("ConfigT", TrainConfig, SftConfig)


@dataclass(frozen=True)
class Parsed(Generic[ConfigT]):
    """A parsed command line: the configuration, and the same as YAML."""

    config: ConfigT
    yaml: str


def parse(cls: type[ConfigT], arguments: list[str], command: str) -> Parsed[ConfigT]:
    """Read `--config FILE` and dotted overrides into a configuration; later ones win.

    Raises:
        UserError: one line that names the setting and the nearest valid one.
        SystemExit: after `--help` or `--print_config`.
    """
    parser = _parser(cls, command)  # type: ignore[arg-type]  # classes hash
    try:
        namespace = parser.parse_args(arguments)
    except ArgumentError as error:
        raise UserError(_one_line(str(error), cls)) from None
    sections = get_type_hints(cls)
    values: dict[str, Any] = {
        name: [_build(RewardConfig, f"rewards[{i}]", entry) for i, entry in enumerate(namespace.rewards or [])]
        if name == "rewards"
        else _build(sections[name], name, vars(namespace[name]))
        for name in sections
    }
    return Parsed(cls(**values), parser.dump(namespace, skip_none=False, skip_link_targets=False))


@functools.cache
def _parser(cls: type[Any], command: str) -> ArgumentParser:
    parser = ArgumentParser(
        prog=f"hybrid-grpo {command}",
        description=cls.__doc__,
        exit_on_error=False,
        default_env=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action=_Recipe, help="YAML file with any of the settings below.")
    parser.add_class_arguments(cls, skip={"rewards"})
    if "rewards" in get_type_hints(cls):
        # As plain entries: of dataclasses, a later list would be merged into an earlier one, entry by entry; and in
        # a dict[str, Any] the text '2' would be read once more, as a number.
        parser.add_argument("--rewards", type=list[dict], default=[], help=_rewards_help())
    return parser


class _Dumper(yaml.SafeDumper):
    """Quotes text that looks like `1e3`: PyYAML takes that for text, and the reader of recipes for a number."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)
set_dumper("yaml", lambda values: yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def _rewards_help() -> str:
    keys = ", ".join(f.name for f in dataclasses.fields(RewardConfig))
    return f"Reward functions: `[{{function: exact_match, weight: 1.0}}, ...]`; an entry has {keys}."


class _Recipe(ActionConfigFile):
    """A YAML file of settings, refused where YAML would let a mistake pass: a key given twice, an empty section."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        path = Path(value)
        _refuse(path.is_dir(), f"--config {path} is a folder: give a YAML file")
        _refuse(not path.is_file(), f"--config {path}: there is no such file")
        try:
            recipe = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
        except (OSError, UnicodeError, yaml.YAMLError) as error:
            raise UserError(f"--config {path} cannot be read: {_yaml_problem(error)}") from None
        if not isinstance(recipe, yaml.MappingNode):
            raise UserError(f"--config {path} holds no settings: write `section:` lines")
        _refuse_doubles(recipe, path)
        sections = {*get_type_hints(TrainConfig), *get_type_hints(SftConfig)} - {"rewards"}
        for key, node in recipe.value:
            _refuse(
                key.value in sections and not isinstance(node, yaml.MappingNode),
                f"--config {path} line {key.start_mark.line + 1}: {key.value} must have settings below it:"
                " give some or take it out",
            )
        super().__call__(parser, namespace, value, option_string)


def _refuse_doubles(node: Any, path: Path) -> None:
    """YAML keeps the last of two equal keys without a word."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            _refuse(key.value in seen, f"--config {path} line {line}: {key.value} is given twice: merge the two")
            seen.add(key.value)
        for _, value in node.value:
            _refuse_doubles(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_doubles(value, path)


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    return where + " ".join((getattr(error, "problem", None) or str(error)).split())


def _build(cls: type[Any], path: str, values: Any) -> Any:
    """The dataclass of one section, every value of the declared type: null, nan and the like are refused."""
    _refuse(not isinstance(values, dict), f"{path} {values!r} must be settings, as in {{{_first_field(cls)}: ...}}")
    hints = get_type_hints(cls)
    for name, value in values.items():
        if name not in hints:
            raise UserError(f"there is no setting {path}.{name}{_did_you_mean(str(name), list(hints))}")
        _refuse(not _fits(value, hints[name]), f"{path}.{name}: expected {_type_name(hints[name])}, got {value!r}")
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        _refuse(required and f.name not in values, f"{path}.{f.name} is not set: give one")
    return cls(**{name: float(value) if hints[name] is float else value for name, value in values.items()})


def _first_field(cls: type[Any]) -> str:
    return dataclasses.fields(cls)[0].name


def _fits(value: Any, hint: Any) -> bool:
    origin, options = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in options)
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in options)
    if origin is tuple:
        return isinstance(value, tuple) and all(map(_fits, value, options))
    if origin is list:
        return isinstance(value, list) and all(_fits(item, options[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_type_name(option) for option in get_args(hint))
    if hint == list[RewardConfig]:
        return "a list such as [{function: exact_match}]"
    names = {float: "a finite number", int: "a whole number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(hint) or {tuple: "[number, number]", list: "a list", dict: "a mapping"}[get_origin(hint)]


def setting_names(cls: type[Any]) -> list[str]:
    """Names of all settings, dotted."""
    return [
        name
        for section, hint in get_type_hints(cls).items()
        for name in (
            [f"{section}.{f.name}" for f in dataclasses.fields(hint)] if dataclasses.is_dataclass(hint) else [section]
        )
    ]


def _one_line(message: str, cls: type[Any]) -> str:
    line = " ".join(message.split())
    unknown = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", line)
    if unknown:
        return _unknown(f"{unknown[1]}.{unknown[2]}", cls)
    unknown = re.search(r"unrecognized arguments: --([\w.]+)", line) or re.search(
        r"(?:Option|Key) '([\w.]+)' is not (?:accepted|expected)$", line
    )
    if unknown and "Parser key" not in line:
        return _unknown(unknown[1], cls)
    stray = re.search(r"unrecognized arguments: (.*)", line)
    if stray:
        return f"{stray[1]} is no option: a setting is given as --section.name value"
    typed = re.search(r"Parser key \"(\w+)(?:\.(\w+))?\": .*?(?:Got|Given) value: ?(.*)", line)
    if typed:
        hint = get_type_hints(cls)[typed[1]]
        hint, name = (get_type_hints(hint)[typed[2]], f"{typed[1]}.{typed[2]}") if typed[2] else (hint, typed[1])
        return f"{name}: expected {_type_name(hint)}, got {typed[3] or 'nothing'}"
    line = re.sub(r"^argument --([\w.]+):", r"\1:", line)
    return re.sub(r"Parser key \"([\w.]+)\":", r"\1:", line)


def _unknown(name: str, cls: type[Any]) -> str:
    """A setting of this name in another section is the likeliest; then a like one of the same section."""
    names = setting_names(cls)
    section, _, last = name.rpartition(".")
    same = [known for known in names if known.rpartition(".")[2] == last]
    if same:
        return f"there is no setting {name}: did you mean {' or '.join(same)}?"
    near = [known for known in names if known.startswith(f"{section}.")]
    return f"there is no setting {name}{_did_you_mean(name, near or list(get_type_hints(cls)))}"


def _did_you_mean(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else f": known are {', '.join(names)}"
