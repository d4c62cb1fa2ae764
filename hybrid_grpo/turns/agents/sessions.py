"""The episodes of a rollout: every turn that an agent asks for continues one of its histories, or begins another.

A request whose chat or tokens continue what the policy has read and written continues that sequence of the decoder,
which reads only what is new. Any other request, after a compaction or by a sub-agent, begins a sequence; it finds the
pages of whatever begins alike. The sequences of an episode are the histories of one completion, with one reward.
"""

from __future__ import annotations

import json
import queue
import secrets
import sys
import time
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

from hybrid_grpo.config import environment_rewards
from hybrid_grpo.config.composition import SamplingConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.fields import function_text
from hybrid_grpo.data.batch import Numbers, Rollout
from hybrid_grpo.data.chat_text import ChatText
from hybrid_grpo.data.completion import Completion, Prompt
from hybrid_grpo.data.packing import begin_alike
from hybrid_grpo.data.prompts import TRUSTED
from hybrid_grpo.distributed.workers.calls import Call, Reply
from hybrid_grpo.distributed.workers.pool import Pool
from hybrid_grpo.generation import Request, stream_key
from hybrid_grpo.generation.sequence import Finish, Sequence
from hybrid_grpo.model.limits import vocabulary_of
from hybrid_grpo.turns.agents.endpoint import Answer, Endpoint
from hybrid_grpo.turns.agents.histories import History, Play, Ready, begins, joined, play_of, stopped
from hybrid_grpo.turns.agents.in_worker import AgentEntry
from hybrid_grpo.turns.agents.protocol import Ask, Refused, Sampled, kept, read, said_by
from hybrid_grpo.turns.reading import Reader, one_at_a_time, reader_of, turn_of
from hybrid_grpo.turns.template import TurnTemplate, tool_message, user_message, written

_TOO_LONG = "context_length_exceeded"
_FOLLOWS = ("user", "tool")
"""Roles of the messages that may continue a history."""


class Agents:
    """The agents of a run and their endpoint; implements the decoder's `Turns` and the endpoint's `Desk`.

    Args:
        stop_ids: tokens that end a turn.

    Raises UserError if the agent, or the tokenizer's chat template, cannot be used.
    """

    setting, begins_sequences = "rollout.agent", True
    schemas: tuple[dict[str, Any], ...] = ()
    tool_names: tuple[str, ...] = ()

    def __init__(self, config: SamplingConfig, tokenizer: Any, stop_ids: tuple[int, ...]) -> None:
        rollout = self._config = config.rollout
        self._tokenizer, self._stop_ids, self._vocabulary = tokenizer, stop_ids, vocabulary_of(tokenizer)
        self._variables = config.data.chat_template_kwargs
        self._ends = {token: tokenizer.convert_ids_to_tokens(token) for token in stop_ids}
        self._text = ChatText(tokenizer, str(tokenizer.get_chat_template()))
        self._known: dict[str, tuple[TurnTemplate, Reader | None]] = {}
        """For tools as JSON, what the template writes between turns, and what reads calls; None without tools."""
        template, _ = self._of_tools("[]", ())
        template.check(self.setting, user_message)
        if not rollout.keep_history:
            template.check_history(self.setting, user_message)
        [self._reward] = environment_rewards(rollout).values()
        entry = AgentEntry(function_text(rollout.agent or ""))
        self._pool = Pool([(self.setting, entry)], config.scoring)
        self._run = self._pool.isolated(0, rollout.agent_timeout_s, spread=True)
        self._endpoint: Endpoint | None = None
        self._plays: list[list[Play]] = []
        self._of_key: dict[str, Play] = {}
        """Episodes that may ask, by the keys that only their agents know."""
        self._open: set[Play] = set()
        self._sampling: dict[int, History] = {}
        """Histories that have not ended, by the keys of their sequences."""
        self._events: queue.SimpleQueue[tuple[Play, Any, Any]] = queue.SimpleQueue()
        self._printed: set[str] = set()
        """Kinds of failures that have been printed."""
        self._ended: list[tuple[float, bool]] = []
        self._waited_s = 0.0
        self._read = self._read_again = 0
        """Tokens of histories that were read since the last call of `numbers`."""

    # What a run asks of whoever answers turns.

    def check(self, prompts: list[Prompt]) -> None:
        """Agents take any row."""

    def opened(self, prompts: list[Prompt], step: int | str) -> list[Prompt]:
        """Return the prompts as they are: an agent opens its own task."""
        return prompts

    def numbers(self, rollout: Rollout) -> Numbers:
        """Return metrics of a rollout's episodes, with seconds counted since the previous call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        ended, self._ended = self._ended, []
        (again, tokens), self._read_again, self._read = (self._read_again, self._read), 0, 0
        histories = [len(completion.histories) for completion in rollout.completions if completion.histories]
        return {
            "time/tool_wait_s": (waited_s, 1),
            "agent/seconds": (sum(seconds for seconds, _ in ended) / max(len(ended), 1), len(ended)),
            "agent/failed_frac": (sum(failed for _, failed in ended) / max(len(ended), 1), len(ended)),
            "agent/read_again_frac": (again / max(tokens, 1), tokens),
            "agent/histories": (sum(histories) / max(len(histories), 1), len(histories)),
        }

    # What the endpoint asks, on its own thread; see `Desk`.

    @property
    def context(self) -> int:
        """See `Desk`."""
        return max((play.longest for play in [*self._of_key.values()]), default=0)

    def admit(self, key: str) -> tuple[Play, str]:
        """See `Desk`."""
        own, _, attempt = key.partition(".")
        play = self._of_key.get(own)
        if play is None:
            raise Refused(401, "the key is not that of an episode under way", "invalid_api_key")
        return play, attempt

    def read(self, path: str, body: Any) -> Ask:
        """See `Desk`."""
        return read(path, body, self._config, self._stop_ids, self._vocabulary)

    def take(self, episode: tuple[Play, str], ask: Ask, answer: Answer) -> None:
        """See `Desk`."""
        self._events.put((episode[0], ask, (episode[1], answer)))

    def leave(self, episode: tuple[Play, str], answer: Answer) -> None:
        """See `Desk`."""
        self._events.put((episode[0], None, answer))

    # What the decoder asks; see `Turns`.

    @property
    def is_open(self) -> bool:
        """See `Turns`."""
        return bool(self._open)

    def begin(self, requests: Items[Request]) -> None:
        """Start an episode for every completion. Those of an earlier call are abandoned."""
        self._endpoint = self._endpoint or Endpoint(self)
        self._close()
        self._plays = [
            [play_of(request, index, k) for k in range(len(request.keys))] for index, request in enumerate(requests)
        ]
        self._open = {play for group in self._plays for play in group}
        self._of_key = {secrets.token_urlsafe(24): play for group in self._plays for play in group}
        for key, play in self._of_key.items():
            task = {**play.prompt.columns, "prompt": play.prompt.text}
            call = Call({"task": [task], "url": [f"{self._endpoint.url}/v1"], "key": [key]}, [None])
            self._run(call).add_done_callback(partial(self._over, play))

    def _over(self, play: Play, future: Any) -> None:
        if not future.cancelled():
            self._events.put((play, future.result(), None))

    def completions(self) -> list[list[Completion]]:
        """See `Turns`."""
        self._close()
        return [[play.completion for play in group if play.completion] for group in self._plays]

    def _close(self) -> None:
        """Take no more requests, and refuse those that wait."""
        self._of_key, self._open = {}, set()
        waiting = [history.answer for history in self._sampling.values() if history.ask is not None]
        self._sampling = {}
        while not self._events.empty():
            _, asked, more = self._events.get()
            waiting += [more[1]] if isinstance(asked, Ask) else []
        for answer in filter(None, waiting):
            answer(Refused(503, "the rollout is over", "closed"))

    def answers(self, patience_s: float) -> Ready:
        """See `Turns`."""
        ready: Ready = []
        while True:
            try:
                if patience_s and not ready:
                    begin_s = time.perf_counter()
                    try:
                        play, event, more = self._events.get(timeout=patience_s)
                    finally:
                        self._waited_s += time.perf_counter() - begin_s
                else:
                    play, event, more = self._events.get_nowait()
            except queue.Empty:
                return ready
            if play not in self._open:
                continue  # of a rollout that was given up
            if isinstance(event, Reply):
                ready += self._outcome(play, event)
            elif isinstance(event, Ask):
                ready += self._asked(play, event, *more)
            else:
                self._left(play, more)

    def _asked(self, play: Play, ask: Ask, attempt: str, answer: Answer) -> Ready:
        """Begin the turn that an agent asks for, or refuse it."""
        if play.outcome is not None:
            answer(Refused(409, "the episode has ended", "closed"))
            return []
        ready: Ready = []
        if attempt != play.attempt:
            play.attempt, play.dropped, play.histories = attempt, play.dropped + play.histories, []
            play.turns, play.sampled, play.is_cut = 0, 0, False
            ready += stopped(play.dropped)
        try:
            history, new = self._history(play, ask)
        except Refused as refusal:
            play.is_cut |= refusal.code == _TOO_LONG
            answer(refusal)
            return ready
        history.ask, history.answer, history.turn, play.turns = ask, answer, play.turns, play.turns + 1
        history.read = len(history.sequence.tokens) + len(new)
        return [*ready, (history.sequence if history.sequence.tokens == [] else history.sequence.key, new)]

    def _history(self, play: Play, ask: Ask) -> tuple[History, list[int]]:
        """Return the history that a request continues, or a new one, and the tokens that follow it. Raises Refused."""
        config = self._config
        under_way = sum(history.sequence.turn_limit for history in play.histories if history.ask is not None)
        room = config.max_completion_tokens - play.sampled - under_way
        _refuse_long(play.turns >= config.max_turns, f"rollout.max_turns is {config.max_turns}")
        _refuse_long(room <= 0, f"rollout.max_completion_tokens is {config.max_completion_tokens}")
        tools = json.dumps(ask.tools, sort_keys=True)
        history, new = self._continued(play, ask, tools)
        if history is None:
            # By what it reads and not by when it comes, so that requests at the same time have a fixed order.
            alike = sum(h.begins_with == new for h in play.histories + play.dropped)
            key, most = stream_key(play.key, *new, alike), config.max_completion_tokens
            of = Sequence(play.request, play.sample, key, [], 0, most, max_total_tokens=play.longest)
            repeats = max((begin_alike(new, h.sequence.tokens) for h in play.histories), default=0)
            history = History(play, of, tools, new, repeats)
        read = len(history.sequence.tokens) + len(new)
        _refuse_long(read >= play.longest, f"{read} tokens leave no room in the {play.longest} of a history")
        history.sequence.turn_limit = min(room, ask.limit or room, config.max_turn_tokens or room)
        if history.sequence.key not in self._sampling:
            self._sampling[history.sequence.key] = history
            play.histories.append(history)
        return history, new

    def _continued(self, play: Play, ask: Ask, tools: str) -> tuple[History | None, list[int]]:
        """Return the longest history that a request continues, and what follows it; without one, all its tokens."""
        free = [history for history in play.histories if history.ask is None]
        if ask.chat is None:
            assert ask.ids is not None
            read = [(len(h.sequence.tokens), h) for h in free if begins(ask.ids, h.sequence.tokens)]
            count, history = max(read, key=lambda of: of[0], default=(0, None))
            return history, ask.ids[count:]
        template, _ = self._of_tools(tools, ask.tools)
        said = [(len(h.chat), h) for h in free if h.chat and h.tools == tools and begins(ask.chat, h.chat)]
        count, history = max(said, key=lambda of: of[0], default=(0, None))
        if history is not None and all(message["role"] in _FOLLOWS for message in ask.chat[count:]):
            return history, template.ids(history.sequence.tokens[-1], ask.chat[count:])
        chat = [m if m["role"] in TRUSTED else {**m, "content": self._text.marked(m["content"])} for m in ask.chat]
        try:
            return None, self._text.ids(written(self._tokenizer, chat, ask.tools, self._variables))
        except Exception as error:  # a template is a program of the model's authors
            raise Refused(400, f"the chat template refuses the messages: {error}") from error

    def _of_tools(self, tools: str, schemas: Items[dict[str, Any]]) -> tuple[TurnTemplate, Reader | None]:
        """Return what the template writes between turns, and what reads calls of the tools; None without tools."""
        if tools not in self._known:
            template = TurnTemplate(self._tokenizer, self._variables, [*schemas], self._stop_ids)
            reader: Reader | None = None
            if schemas:
                kind, most, ends = self._config.tool_format, self._config.max_turn_calls, self._ends.values()
                example = partial(tool_message, 0, schemas[0]["function"]["name"])
                try:
                    reader = reader_of(kind, self._tokenizer, self._variables, schemas, ends, most)
                except UserError as error:
                    raise Refused(400, f"tools: {error}") from error
                reader = reader if template.takes_several(example) else one_at_a_time(reader)
            self._known[tools] = template, reader
        return self._known[tools]

    def ended(self, key: int, turn_ids: list[int], room: int) -> Finish | None:
        """See `Turns`."""
        return self._said(self._sampling[key], "stop")

    def cut(self, key: int) -> Finish | None:
        """See `Turns`. The agent may continue a turn that was cut."""
        return self._said(self._sampling[key], "length")

    def _said(self, history: History, finish: Finish) -> Finish | None:
        """Answer the request whose turn has ended."""
        play, sequence, ask, answer = history.play, history.sequence, history.ask, history.answer
        ids = sequence.tokens[sequence.begin :]
        history.ask = None
        if play.outcome is not None or history in play.dropped:
            return finish
        play.sampled += len(ids)
        assert ask is not None and answer is not None
        turn = turn_of(self._tokenizer, self._known[history.tools][1], self._ends, ids)
        texts = [self._tokenizer.decode([token]) for token in ids] if ask.chat and ask.has_logprobs else []
        sampled = Sampled(turn, ids, sequence.logp[-len(ids) :], texts, history.read, finish)
        if ask.chat is not None:
            history.chat = [*ask.chat, kept(said_by(sampled))]
        answer(sampled)
        return None

    def _left(self, play: Play, answer: Answer) -> None:
        """Cut the turn whose client has gone."""
        stopped([history for history in play.histories if history.answer is answer and history.ask is not None])

    def _outcome(self, play: Play, reply: Reply) -> Ready:
        """Take what an agent returned, and end its histories."""
        play.outcome, failure = reply, reply.failures[0]
        self._ended.append((time.perf_counter() - play.begin_s, failure is not None))
        if failure is not None and failure.kind not in self._printed:
            self._printed.add(failure.kind)
            which = f"for row {play.prompt.id} (from 0): {failure.message}. The episode has no reward"
            print(f"{self.setting} failed {which}\n{failure.traceback}", file=sys.stderr, flush=True)
        if play.histories:
            return stopped(play.histories)
        # A completion has a token, also where nothing was asked.
        end = self._stop_ids[0]
        sequence = Sequence(play.request, play.sample, stream_key(play.key, "nothing"), [end], 0, 1)
        sequence.sampled, sequence.logp = [end], [0.0]
        play.histories = [History(play, sequence, "[]")]
        self._sampling[sequence.key] = play.histories[0]
        return [(sequence, "stop")]

    def finished(self, key: int, completion: Completion) -> Completion | None:
        """See `Turns`."""
        history = self._sampling.pop(key)
        play, history.completion = history.play, completion
        self._read += len(history.sequence.tokens) - len(completion.token_ids) - history.sequence.known
        self._read_again += max(0, history.repeats - history.sequence.known)
        if play.outcome is None or any(h.completion is None for h in play.histories + play.dropped):
            return None
        play.completion = joined(play, play.outcome, self._reward)
        self._open.discard(play)
        return play.completion


def _refuse_long(condition: bool, message: str) -> None:
    if condition:
        raise Refused(400, message, _TOO_LONG)
