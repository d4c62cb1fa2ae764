"""Settings of rollouts: how completions are sampled, and what answers their turns."""

import re
from collections.abc import Callable
from dataclasses import field
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, PlainSerializer, model_serializer, model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config import fields
from hybrid_grpo.config.about import MAY_CHANGE, About
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.secrets import refuse_masked


def _text_keys(value: Any) -> Any:
    """Convert token ids, which YAML and Python give as numbers and the command line as text, to text."""
    return {str(k) if type(k) is int else k: v for k, v in value.items()} if isinstance(value, dict) else value


def _places(environment: Any) -> Any:
    if isinstance(environment, dict):
        return {name: fields.function_text(function) for name, function in environment.items()}
    return environment if environment is None else fields.function_text(environment)


def _check_environment(value: Any) -> Any:
    for place in value.values() if isinstance(value, dict) else [value]:
        if not callable(place) and not (isinstance(place, str) and place):
            raise ValueError(f"{place!r:.40} is not a class: give its place, path/to/file.py:Class, or places by names")
    return value


Environment = Annotated[
    fields.Text | Callable[..., Any] | dict[fields.Name, fields.Text | Callable[..., Any]],
    BeforeValidator(_check_environment),
    PlainSerializer(_places),
]
"""`path/to/file.py:Class`, or several such places in a mapping, by name; in Python also the classes themselves."""


ToolFormat = Literal[
    "auto", "hermes", "mistral", "qwen3_coder", "glm45", "kimi_k2", "deepseek_v3", "gemma4", "minimax_m2", "granite",
    "phi4_mini", "olmo3", "lfm2", "llama3", "pythonic",
]  # fmt: skip
"""Names of the formats in turns/formats/."""
_OF_SAMPLING = About(unused_by="eval", rank=6)
_OF_TURNS = About(unused_by="chat")


@dataclass(frozen=True, config=fields.SECTION)
class ToolConfig:
    """A tool that the model can call."""

    function: fields.Function
    """`calculator` or another built-in, `path/to/file.py:function`, or `package.module:function`; in Python also the
    function itself."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments that are the same in every call; the model does not see them. An argument that has the name of a secret
    is written as *** wherever settings are written."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, entry: Any) -> Any:
        is_function = isinstance(entry, str | Callable) and not isinstance(entry, cls)
        return {"function": entry.strip() if isinstance(entry, str) else entry} if is_function else entry

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_masked("rollout.tools", self.kwargs)
        return self

    @model_serializer
    def _write(self) -> str | dict[str, Any]:
        name = fields.function_text(self.function)
        return {"function": name, "kwargs": self.kwargs} if self.kwargs else name


@dataclass(frozen=True, config=fields.SECTION)
class RolloutConfig:
    """How completions are sampled."""

    about = About(rank=9)
    prompts_per_step: Annotated[fields.Count, About(usual=4, in_plan=2, unused_by="eval generate chat", rank=2)] = 32
    """Number of prompts in one rollout, over all ranks (P)."""
    num_generations: Annotated[fields.Count, About(usual=4, in_plan=2, unused_by="eval chat", rank=2)] = 8
    """Number of completions per prompt (G). They form the group within which advantages are computed."""
    max_completion_tokens: Annotated[fields.Count, About(usual=4, in_eval=4, in_plan=2, rank=6)] = 512
    """Maximum number of tokens sampled for a completion."""
    min_completion_tokens: fields.Whole = 0
    """Minimum tokens of a completion: until then, stop ids are not drawn, and stop strings do not end it."""
    temperature: Annotated[fields.NotNegative, About(usual=4), _OF_SAMPLING] = 1.0
    """Softmax temperature, for sampling and for every log-probability in the loss."""
    top_p: Annotated[fields.PositiveShare, _OF_SAMPLING] = 1.0
    """Nucleus sampling: keep the smallest set of tokens with at least this total probability; 1 keeps all tokens."""
    top_k: Annotated[fields.Whole, _OF_SAMPLING] = 0
    """Keep the k most probable tokens; 0 keeps all."""
    min_p: Annotated[fields.Share, _OF_SAMPLING] = 0.0
    """After top-k and top-p, keep the tokens with at least this share of the largest probability; 0 keeps all."""
    repetition_penalty: Annotated[fields.Positive, About(unused_by="eval")] = 1.0
    """Logits of tokens in the prompt or the completion so far are divided by this if they are positive, and multiplied
    by it otherwise (CTRL, arXiv:1909.05858); 1 changes nothing."""
    logit_bias: Annotated[dict[str, fields.Number], BeforeValidator(_text_keys), About(unused_by="eval")] = field(
        default_factory=dict
    )
    """Numbers that are added to the logits of tokens, by token id: `{"42": -100.0}`."""
    stop_ids: list[fields.Whole] = field(default_factory=list)
    """Token ids that end a completion, in addition to the model's own end-of-sequence ids."""
    stop_strings: list[fields.Text] = field(default_factory=list)
    """Texts that end a completion as soon as it contains one of them. The text remains part of the completion."""
    ignore_eos: fields.Switch = False
    """Let only a token limit end a completion, for benchmarks."""
    logprobs: Annotated[Literal["softmax", "sampling", "mask"], About(unused_by="eval chat")] = "softmax"
    """Distribution under which `old_logp` is recorded: the `softmax` at the temperature, as in the training forward
    pass, or the filtered distribution that tokens were drawn from (`sampling`). `mask` also records the tokens that
    top_p, top_k and min_p left, and the training forward pass normalizes over the same tokens."""
    decoder: Literal["paged", "transformers"] = "paged"
    """`transformers` decodes with generate(), for architectures that the paged decoder cannot run."""
    weights: Annotated[
        Literal["merged", "unmerged", "int8"], About(in_plan=4, unused_by="eval generate chat"), MAY_CHANGE
    ] = "merged"
    """What completions are sampled from: the weights, with adapters `merged` into a copy; those of a model with
    adapters as they are, in four bits too, with the adapters beside them (`unmerged`: less memory, mostly slower; not
    at ZeRO stage 3); or a copy of linear layers in eight bits (`int8`: half the memory, and less time for few rows)."""
    max_slots: Annotated[fields.Count, About(unused_by="chat"), MAY_CHANGE] = 256
    """Maximum number of completions that are decoded at the same time on one rank."""
    prefill_tokens: Annotated[fields.Count | None, MAY_CHANGE] = None
    """Maximum number of prompt tokens in one prefill forward pass; a longer prompt takes several. Default: 2,048 on a
    CPU; on a GPU up to 16,384, as far as that leaves memory for the cache."""
    cache_gb: Annotated[fields.Gibibytes | None, MAY_CHANGE] = None
    """Size of the key-value cache of one rank, in GiB. Default: as much as free memory allows."""
    keep_cache: Annotated[Literal["auto", "on", "off"], About(unused_by="eval generate chat"), MAY_CHANGE] = "auto"
    """Whether a GPU keeps the cache, gathered weights and CUDA graphs from rollout to rollout, so that graphs are
    captured once per run. `auto` keeps them if the memory plan has room for them in training. A CPU keeps none."""

    carry: fields.Share = 0.0
    """Share of prompts_per_step, rounded to at least one prompt, whose groups are not waited for: a step ends when all
    but so many are complete. Those continue in the next step, under its policy. 0 waits for all. See docs/carry.md."""
    max_carries: fields.Count = 4
    """Maximum number of steps into which a group is carried; in the last of these it is waited for."""

    tools: Annotated[list[ToolConfig], _OF_TURNS] = field(default_factory=list)
    """Functions that the model may call between its turns, as `path/to/file.py:name`. They need type hints, and a
    docstring that describes the arguments. Arguments that the model does not give are set as in `[{function: search,
    kwargs: {folder: texts}}]`."""
    environment: Annotated[Environment | None, _OF_TURNS] = None
    """Class whose instances answer the model's turns, as `path/to/file.py:Class`. Several classes are given as a
    mapping, from which the column `environment` selects one for each row. See docs/environments.md."""
    tool_format: Annotated[ToolFormat, _OF_TURNS] = "auto"
    """Format in which the model writes tool calls. `auto` takes the first format that can read a call written by the
    chat template. See docs/tools.md."""
    max_turns: Annotated[fields.Count, _OF_TURNS] = 8
    """Maximum number of turns in a completion with tools or an environment, whose last turn is not answered, or of
    an episode of an agent."""
    max_tool_tokens: Annotated[fields.Count, _OF_TURNS, About(rank=6)] = 512
    """Maximum number of tokens in the answer to a turn, including those of the chat template; longer answers of tools
    and environments are cut. With an agent it only counts for the default of max_total_tokens."""
    tool_timeout_s: Annotated[fields.Seconds, _OF_TURNS] = 30.0
    """Maximum seconds for a tool call, after which the model reads an error message instead of a result; also for a
    step of an environment, after which the completion has failed."""
    max_turn_calls: Annotated[fields.Count, _OF_TURNS] = 16
    """Maximum number of tool calls in one turn. Further calls are not made, and the model reads an error message."""
    environment_processes: Annotated[fields.Count | None, _OF_TURNS] = None
    """Maximum number of environment processes on one rank; further environments wait until one of these ends. Default:
    max_slots, but at most half the number of files that a process may open."""
    keep_history: Annotated[fields.Switch, _OF_TURNS] = False
    """Allow a chat template that changes earlier turns, for example by removing their thinking. In training, the model
    still reads its turns as it wrote them. By default, such a template is refused."""
    max_turn_tokens: Annotated[fields.Count | None, About(rank=6)] = None
    """Maximum number of tokens sampled in one turn. A turn that reaches this without ending is the last one, and the
    completion counts as cut. Default: max_completion_tokens."""
    max_total_tokens: Annotated[fields.Count | None, About(rank=6)] = None
    """Maximum total number of tokens: prompt, sampled tokens, and tokens inserted between turns. A completion that
    reaches this is cut. Default: what the other limits add up to."""

    agent: Annotated[fields.Function | None, _OF_TURNS] = None
    """Program that calls the model itself, one episode for each completion: `path/to/file.py:function`, called with a
    task and a client of openai, or a command line that finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment. It
    returns the reward, or None. See docs/agents.md."""
    agent_timeout_s: Annotated[fields.Seconds, _OF_TURNS] = 600.0
    """Maximum seconds for an episode of `agent`, which then has failed."""

    @property
    def carried_groups(self) -> int:
        """Number of groups that a step leaves to the next one, over all ranks."""
        return max(1, round(self.carry * self.prompts_per_step)) if self.carry else 0

    @property
    def turns_setting(self) -> str | None:
        """The name of a setting that gives completions several turns; None if there is none."""
        asked = ("tools", self.tools), ("environment", self.environment), ("agent", self.agent)
        return next((f"rollout.{name}" for name, value in asked if value), None)

    @property
    def has_turns(self) -> bool:
        return self.turns_setting is not None

    @property
    def environments(self) -> dict[str, str]:
        """Places of the environment classes, keyed by the names that rows use; a single class has an empty name."""
        if self.environment is None:
            return {}
        named = self.environment if isinstance(self.environment, dict) else {"": self.environment}
        places: dict[str, str] = _places(named)
        return places

    @property
    def max_read_tokens(self) -> int:
        """Maximum number of tokens that may follow a short prompt, including answers between turns and observations."""
        answers = (self.max_turns - 1 if self.has_turns else 0) + bool(self.environment)
        return self.max_completion_tokens + answers * self.max_tool_tokens

    @property
    def lengths(self) -> str:
        """The settings that limit the length of a prompt with its completion."""
        return (
            "rollout.max_total_tokens" if self.has_turns else "data.max_prompt_tokens + rollout.max_completion_tokens"
        )

    def longest(self, prompt: int, *, opened: bool = False) -> int:
        """Return the maximum length of a completion with its prompt, which has `prompt` tokens. `opened`: the prompt
        contains the initial observation of its environment."""
        longest = prompt + self.max_read_tokens - (self.max_tool_tokens if opened else 0)
        return longest if self.max_total_tokens is None else min(longest, self.max_total_tokens)

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        refuse(
            self.has_turns and self.ignore_eos,
            f"{self.turns_setting} speaks between turns, and rollout.ignore_eos lets no turn end: remove one of them",
        )
        refuse(self.environment == {}, "rollout.environment is an empty mapping: name an environment, or remove it")
        others = [name for name in ("tools", "environment") if getattr(self, name)] if self.agent is not None else []
        refuse(bool(others), f"rollout.agent has its own tools: remove rollout.{', '.join(others)}, or the agent")
        refuse(
            self.environment_processes is not None and not self.environment,
            "rollout.environment_processes has no effect without rollout.environment: remove it",
        )
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        least = self.min_completion_tokens
        refuse(
            least > self.max_completion_tokens,
            f"rollout.min_completion_tokens {least} is more than rollout.max_completion_tokens"
            f" {self.max_completion_tokens}: set it to that or lower",
        )
        refuse(
            self.max_turn_tokens is not None and least > self.max_turn_tokens,
            f"rollout.min_completion_tokens {least} lets no first turn end within rollout.max_turn_tokens"
            f" {self.max_turn_tokens}: set it to that or lower",
        )
        for token in self.logit_bias:
            refuse(
                not re.fullmatch(r"0|[1-9][0-9]*", token),
                f"rollout.logit_bias {token!r} is not a token id: give a whole number, 0 or greater",
            )
        for name in ("stop_ids", "stop_strings"):
            refuse(
                self.ignore_eos and bool(getattr(self, name)),
                f"rollout.{name} ends completions, and rollout.ignore_eos leaves that to the limit: set one of the two",
            )
        return self

    @model_validator(mode="after")
    def _check_carry(self) -> Self:
        refuse(
            not self.carry and self.max_carries != type(self).max_carries,
            f"rollout.max_carries {self.max_carries} has no effect with rollout.carry 0: remove it",
        )
        refuse(
            bool(self.carry) and self.has_turns,
            f"rollout.carry {self.carry:g} leaves completions open after a step, and those of {self.turns_setting} may"
            " wait for an answer: remove one of them",
        )
        refuse(
            bool(self.carry) and self.logprobs == "sampling",
            f"rollout.carry {self.carry:g} compares the policy with older ones by recorded log-probabilities, and those"
            " of rollout.logprobs sampling are of other distributions: set that to mask or softmax",
        )
        return self

    @model_validator(mode="after")
    def _check_mask(self) -> Self:
        if self.logprobs != "mask":
            return self
        refuse(
            not self.top_k and self.top_p == 1 and not self.min_p,
            "rollout.logprobs mask records what filters leave, and there is none: set rollout.top_p, top_k or min_p, or"
            " rollout.logprobs to softmax",
        )
        for name, default in (("repetition_penalty", 1), ("logit_bias", {})):
            refuse(
                getattr(self, name) != default,
                f"rollout.{name} changes probabilities, and rollout.logprobs mask only knows which tokens were left:"
                f" remove rollout.{name}, or set rollout.logprobs to sampling",
            )
        return self

    @model_validator(mode="after")
    def _check_decoder(self) -> Self:
        """Refuse settings that only the paged decoder supports."""
        if self.decoder == "paged":
            return self
        for name, is_set, why in (
            ("environment_processes", self.environment_processes is not None, "completes all prompts at the same time"),
            ("cache_gb", self.cache_gb is not None, "does not bound its caches"),
            ("keep_cache", self.keep_cache == "on", "builds its caches anew"),
            ("carry", self.carry != 0, "completes all that it began"),
            ("agent", self.agent is not None, "completes prompts that are known before"),
            ("weights", self.weights == "int8", "would unpack all of them for every token"),
        ):
            refuse(
                is_set, f"rollout.{name} {getattr(self, name)}: rollout.decoder transformers {why}: remove one of them"
            )
        return self


def environment_rewards(rollout: RolloutConfig) -> dict[str, str]:
    """Return the names of the environments' rewards (the class names), keyed by the names that rows use; of an agent
    its function's name, or `agent` for a command line."""
    if rollout.agent is not None:
        agent = fields.function_text(rollout.agent)
        return {"": "agent" if " " in agent else agent.rpartition(":")[2]}
    return {name: place.rpartition(":")[2].rpartition(".")[2] for name, place in rollout.environments.items()}
