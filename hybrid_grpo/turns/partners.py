"""All partners of a run together: the decoder requests answers from them between turns."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

from hybrid_grpo.config import DataConfig, RolloutConfig
from hybrid_grpo.config.composition import SamplingConfig
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.data.batch import Numbers, Rollout
from hybrid_grpo.data.completion import Completion, Message, Prompt
from hybrid_grpo.data.picture import Picture
from hybrid_grpo.data.pictures import ImageStore, bared, has_images
from hybrid_grpo.data.prompts import begins_answer
from hybrid_grpo.generation import Request, stream_key
from hybrid_grpo.turns.agents.sessions import Agents
from hybrid_grpo.turns.environments.environments import Environments
from hybrid_grpo.turns.observations import error_text
from hybrid_grpo.turns.openings import Openings
from hybrid_grpo.turns.reading import reader_of, turn_of
from hybrid_grpo.turns.template import TurnTemplate, assistant_message
from hybrid_grpo.turns.tools.tools import Tools
from hybrid_grpo.turns.trajectory import Answer, Arrivals, Finish, Partner, Trajectory

_ANSWERS_KEPT = 1024
"""Number of answers whose tokens are cached."""


class TurnResponders:
    """Answers the turns of completions; implements the decoder's `Turns`.

    The first partner that takes a turn answers it. A turn that no partner takes ends its completion, along with the
    completion's environment, if any. The order in which answers arrive does not affect the completions.

    Args:
        partners: all partners, in the order in which turns are offered to them.
        openings: appends initial observations to prompts that have environments.
        tokenizer, variables, stop_ids, seen: see `TurnTemplate`.

    Raises UserError if the chat template has no place for the partners' answers, their pictures or tool calls.
    """

    begins_sequences = is_open = False

    def __init__(
        self, partners: Sequence[Partner], tools: Tools | None, config: RolloutConfig, tokenizer: Any,
        variables: dict[str, Any], stop_ids: tuple[int, ...], environments: Environments | None = None,
        openings: Openings | None = None, seed: int = 0, seen: tuple[ImageStore, DataConfig] | None = None,
    ) -> None:  # fmt: skip
        self._partners, self.tools, self._config = partners, tools, config
        self.environments, self._openings, self._seed = environments, openings, seed
        self.schemas: list[dict[str, Any]] = [] if tools is None else tools.schemas
        self.tool_names: list[str] = [] if tools is None else tools.names
        self._between = TurnTemplate(tokenizer, variables, self.schemas, stop_ids, seen)
        for partner in partners:
            self._between.check(partner.setting, partner.example)
            if partner.shows:
                self._between.check_pictures(partner.setting, partner.example)
            if not config.keep_history:
                self._between.check_history(partner.setting, partner.example)
        self._read = reader_of(self._between, config.tool_format, config.max_turn_calls) if tools is not None else None
        self._requests: dict[int, Request] = {}
        self._under_way: dict[int, Trajectory] = {}
        self._answers: Arrivals[tuple[Trajectory, int, Answer]] = Arrivals()
        self._frames: dict[tuple[Any, ...], int] = {}
        self._tokenized: dict[bytes, tuple[list[Message], list[int]]] = {}

    def check(self, prompts: list[Prompt]) -> None:
        """Raise UserError if a row lacks what its environment needs, or begins an answer."""
        begun = next(filter(begins_answer, prompts), None)
        if begun is not None:
            raise UserError(
                f"data.prompt_column: row {begun.id} (from 0) ends with a message of the assistant, which is continued"
                " only in completions of one turn: end it with the user's, or remove tools and environment"
            )
        if self.environments is not None:
            self.environments.check(prompts)

    def opened(self, prompts: list[Prompt], step: int | str) -> list[Prompt]:
        """Return prompts with the initial observations of their environments. The seed of an environment is a function
        of (run seed, step, prompt); `step` may also name a held-out set."""
        if self._openings is None:
            return prompts
        # numpy and Gymnasium take seeds of 32 bits.
        seeds = [stream_key(self._seed, step, prompt.epoch, prompt.id) % 2**32 for prompt in prompts]
        return self._openings.opened(prompts, seeds)

    def begin(self, requests: Sequence[Request]) -> None:
        self._under_way = {}
        self._requests = {key: request for request in requests for key in request.keys}
        self._answers.waited_s()
        for partner in self._partners:
            partner.seconds.numbers()
        if self.environments is not None:
            self.environments.give_up()

    def ended(self, key: int, turn_ids: list[int], room: int) -> Finish | None:
        """See `Turns`. A completion is cut if its last turn calls a tool, but there is no room for another turn."""
        trajectory = self._trajectory(key)
        trajectory.sampled += len(turn_ids)
        trajectory.is_last = room <= 0 or trajectory.turns + 1 >= self._config.max_turns
        turn = turn_of(self._between, self._read, turn_ids)
        partner = next((p for p in self._partners if p.takes(trajectory, turn)), None)
        if partner is None:
            return self._ends(trajectory, "stop")
        if trajectory.is_last and not partner.reads_last:
            return self._ends(trajectory, "length")
        trajectory.turns += 1
        trajectory.last = turn_ids[-1]
        trajectory.messages.append(assistant_message(turn.content, turn.calls))
        partner.answer(trajectory, turn, partial(self._take, trajectory, trajectory.turns))
        return None

    def cut(self, key: int) -> Finish | None:
        return self._ends(self._trajectory(key), "length")

    def _ends(self, trajectory: Trajectory, finish: Finish) -> Finish | None:
        """Return how a completion ends; None if its environment has to end first."""
        if self.environments is None:
            return finish
        self.environments.end(trajectory, finish, partial(self._take, trajectory, trajectory.turns))
        return None

    def _trajectory(self, key: int) -> Trajectory:
        if key not in self._under_way:
            request = self._requests.get(key)
            self._under_way[key] = Trajectory(key, request.prompt if request else None)
        return self._under_way[key]

    def _take(self, trajectory: Trajectory, turn: int, answer: Answer) -> None:
        self._answers.put((trajectory, turn, answer))

    def answers(self, patience_s: float) -> list[tuple[int, list[int] | Finish]]:
        ready: list[tuple[int, list[int] | Finish]] = []
        while (arrived := self._answers.next(0.0 if ready else patience_s)) is not None:
            trajectory, turn, answer = arrived
            if self._under_way.get(trajectory.key) is not trajectory or trajectory.turns != turn:
                continue  # the answer belongs to a rollout that was given up
            if answer.finish is not None:
                ready.append((trajectory.key, answer.finish))
                continue
            if not answer.messages:
                if finish := self._ends(trajectory, "stop"):
                    ready.append((trajectory.key, finish))
                continue
            observation = self._written(trajectory, answer.messages)
            if self.environments is None:
                ready.append((trajectory.key, observation))
            elif self.environments.has_failed(trajectory):
                self._ends(trajectory, "stop")
            elif not self._fits(trajectory, observation):
                # The decoder would end the completion, but not its environment.
                self._ends(trajectory, "length")
            else:
                trajectory.observed += len(observation)
                ready.append((trajectory.key, observation))
        return ready

    def _fits(self, trajectory: Trajectory, observation: list[int]) -> bool:
        """Whether an answer leaves room to sample after it."""
        request = self._requests[trajectory.key]
        read = len(request.prompt_ids) + trajectory.sampled + trajectory.observed
        return request.max_total_tokens is None or read + len(observation) < request.max_total_tokens

    def _written(self, trajectory: Trajectory, messages: list[Message]) -> list[int]:
        """Return the tokens of messages that answer a turn, each cut to its share of `max_tool_tokens`."""
        if has_images(messages):
            shortened, pictures = self._shortened(trajectory, messages)
            trajectory.messages += shortened
            trajectory.pictures += pictures
            return self._between.ids(trajectory.last, shortened, pictures)
        # Completions of a group often get the same answer, and a template takes longer than a decode step.
        digest = sha256(json.dumps([trajectory.last, messages]).encode()).digest()  # answers may have a megabyte
        if digest not in self._tokenized:
            if len(self._tokenized) >= _ANSWERS_KEPT:
                self._tokenized.clear()
            shortened, _ = self._shortened(trajectory, messages)
            self._tokenized[digest] = shortened, self._between.ids(trajectory.last, shortened)
        shortened, ids = self._tokenized[digest]
        trajectory.messages += map(dict, shortened)
        return list(ids)

    def _shortened(self, trajectory: Trajectory, messages: list[Message]) -> tuple[list[Message], list[Picture]]:
        """Return messages that answer a turn, each cut to its share of `max_tool_tokens`, and the pictures in them. A
        message whose pictures cannot be used becomes text that says so."""
        share = (self._config.max_tool_tokens - self._frame(trajectory.last, messages)) // len(messages)
        shortened, shown = list[Message](), list[Picture]()
        for message in messages:
            bare, files = bared(message)
            try:
                pictures = self._between.read(files, f"the answer to turn {trajectory.turns}")
            except UserError as error:
                bare, pictures = {**message, "content": error_text(error)}, []
            shortened.append(self._between.cut(bare, max(0, share), pictures))
            shown += pictures if has_images(shortened[-1]) else []
        return shortened, shown

    def _frame(self, last: int, messages: list[Message]) -> int:
        """Return the number of tokens that the template adds around the contents of these messages."""
        speakers = (last, *((message["role"], message.get("name")) for message in messages))
        if speakers not in self._frames:
            self._frames[speakers] = len(self._between.ids(last, [{**m, "content": ""} for m in messages]))
        return self._frames[speakers]

    def finished(self, key: int, completion: Completion) -> Completion:
        trajectory = self._under_way.pop(key)
        before = trajectory.messages
        if completion.turns == sum(message["role"] == "assistant" for message in before):
            # A partner answered the last turn by ending the completion.
            before = before[: max(k for k, message in enumerate(before) if message["role"] == "assistant")]
        shown = sum(part["type"] == "image" for m in before if has_images(m) for part in m["content"])
        pictures, calls = tuple(trajectory.pictures[:shown]), tuple(sorted(trajectory.calls))
        episode = self.environments.episode(key) if self.environments is not None else None
        messages = *before, assistant_message(completion.text, [])
        return replace(completion, messages=messages, pictures=pictures, episode=episode, calls=calls)

    def completions(self) -> list[list[Completion]]:
        raise NotImplementedError("the decoder has the completions")

    def numbers(self, rollout: Rollout) -> Numbers:
        """Return metrics of the completions of a rollout, with seconds counted since `begin` or the previous call."""
        numbers: Numbers = {"time/tool_wait_s": (self._answers.waited_s(), 1)}
        for partner in self._partners:
            numbers |= partner.numbers(rollout)
        return numbers


Partners = TurnResponders | Agents


def partners_of(
    config: SamplingConfig, tokenizer: Any, ends: tuple[int, ...], album: ImageStore | None = None
) -> Partners | None:
    """Create what answers turns; None if completions have one turn. Raises UserError if a part of it, or the tokenizer,
    cannot be used. `ends` are the tokens that end a turn, and `album` has the pictures of prompts."""
    rollout, data = config.rollout, config.data
    if not rollout.has_turns:
        return None
    has_chats = tokenizer.chat_template is not None and data.chat_template != "never"
    what = "tools are called" if rollout.tools else "environment is asked" if rollout.environment else "agent asks"
    refuse(
        not has_chats,
        f"rollout.{what} in chats: take a policy.model whose tokenizer has a chat template that knows tools, and"
        " data.chat_template auto or always",
    )
    agents = Agents(config, tokenizer, ends, album) if rollout.agent is not None else None
    environments = Environments(rollout, config.scoring) if rollout.environments else None
    has_methods = environments is not None and any(kind.tools for kind in environments.kinds.values())
    tools = Tools(rollout, config.scoring, environments) if rollout.tools or has_methods else None
    partners: list[Partner] = [tools] if tools is not None else []
    openings = None
    if environments is not None:
        openings = Openings(environments, tools, data, tokenizer, rollout.max_tool_tokens, album)
        partners.append(environments)
    for setting in [each.setting for each in (agents, *partners) if each is not None and each.shows]:
        refuse(album is None, f"{setting} shows pictures, and policy.model sees none: take a model that does")
        assert album is not None
        album.check(setting)
        album.empty = False
    if agents is not None:
        return agents
    variables, seed = data.chat_template_kwargs, config.run.seed
    seen = None if album is None else (album, data)
    return TurnResponders(partners, tools, rollout, tokenizer, variables, ends, environments, openings, seed, seen)


def with_tools(data: DataConfig, partners: Partners | None) -> DataConfig:
    """Return the data settings, changed so that all prompts are chats that describe the tools to the model."""
    if partners is None:
        return data
    tools = {"tools": partners.schemas} if partners.schemas else {}
    return replace(data, chat_template="always", chat_template_kwargs=data.chat_template_kwargs | tools)
