"""The episodes of a rollout: every turn that an agent asks for continues one of its histories, or begins another.

A request whose chat or tokens continue what the policy has read and written continues that sequence of the decoder,
which reads only what is new. Any other request, after a compaction or by a sub-agent, begins a sequence; it finds the
pages of whatever begins alike. The sequences of an episode are the histories of one completion, with one reward.
"""

import json
import secrets
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

from hybrid_grpo.config import environment_rewards
from hybrid_grpo.config.composition import SamplingConfig
from hybrid_grpo.config.fields import function_text
from hybrid_grpo.data.batch import Numbers, Rollout
from hybrid_grpo.data.completion import Completion, Message, Prompt
from hybrid_grpo.data.packing import begin_alike
from hybrid_grpo.data.picture import Picture
from hybrid_grpo.data.pictures import ImageStore, bared, filled, placed
from hybrid_grpo.distributed.workers.calls import Call, Reply
from hybrid_grpo.distributed.workers.pool import Pool
from hybrid_grpo.generation import Request, stream_key
from hybrid_grpo.generation.sequence import Finish, Sequence
from hybrid_grpo.model.limits import vocabulary_of
from hybrid_grpo.turns.agents.endpoint import Answer, Endpoint
from hybrid_grpo.turns.agents.histories import History, Play, Ready, begins, checked, joined, stopped
from hybrid_grpo.turns.agents.in_worker import AgentEntry
from hybrid_grpo.turns.agents.protocol import Ask, Refused, Sampled, read, recorded, refuse, remembered
from hybrid_grpo.turns.observations import digest
from hybrid_grpo.turns.reading import Reader, reader_of, turn_of
from hybrid_grpo.turns.template import TurnTemplate, user_message
from hybrid_grpo.turns.trajectory import Arrivals

_TOO_LONG = "context_length_exceeded"
_as_text = partial(json.dumps, default=digest)
_FOLLOWS = ("user", "tool")
"""Roles of the messages that may continue a history."""


class Agents:
    """The agents of a run and their endpoint; implements the decoder's `Turns`. Raises UserError if the agent, or the
    tokenizer's chat template, cannot be used."""

    setting, begins_sequences = "rollout.agent", True
    schemas: tuple[dict[str, Any], ...] = ()
    tool_names: tuple[str, ...] = ()

    def __init__(self, config: SamplingConfig, tokenizer: Any, ends: tuple[int, ...], album: ImageStore | None) -> None:
        rollout = self._config = config.rollout
        self._seen = None if album is None else (album, config.data)
        self._tokenizer, self._stop_ids, self._vocabulary = tokenizer, ends, vocabulary_of(tokenizer)
        self._variables = config.data.chat_template_kwargs
        self._known: dict[str, tuple[TurnTemplate, Reader | None]] = {}
        """For tools as JSON, what the chat template writes, and what reads calls; None without tools."""
        template, _ = self._of_tools("[]", ())
        template.check(self.setting, user_message)
        if not rollout.keep_history:
            template.check_history(self.setting, user_message)
        [self._reward] = environment_rewards(rollout).values()
        entry = AgentEntry(function_text(rollout.agent or ""))
        self._pool = Pool([(self.setting, entry)], config.scoring)
        self.shows = bool(self._pool.interfaces[0].schema.get("shows"))
        self._run = self._pool.isolated(0, rollout.agent_timeout_s, spread=True)
        self._endpoint: Endpoint | None = None
        self._plays: list[list[Play]] = []
        self._of_key: dict[str, Play] = {}
        """Episodes that may ask, by the keys that only their agents know."""
        self._open: set[Play] = set()
        self._begun: dict[str, tuple[list[int], list[Picture]]] = {}
        """Tokens and pictures of the chats with which histories of a rollout began; episodes of a group begin alike."""
        self._sampling: dict[int, History] = {}
        """Histories that have not ended, by the keys of their sequences."""
        self._events: Arrivals[Callable[[], Ready]] = Arrivals()
        """What to do when the decoder next looks for answers."""
        self._printed: set[str] = set()
        """Kinds of failures that have been printed."""
        self._ended: list[tuple[float, bool]] = []
        """The seconds of each episode that has ended, and whether it failed."""
        self._read = self._read_again = 0
        """Tokens of histories that were read since the last call of `numbers`."""

    # What a run asks of whoever answers turns.

    def check(self, prompts: list[Prompt]) -> None:
        """Agents take any row."""

    def opened(self, prompts: list[Prompt], step: int | str) -> list[Prompt]:
        """Return the prompts as they are: an agent opens its own task."""
        return prompts

    def numbers(self, rollout: Rollout) -> Numbers:
        """Return metrics of a rollout's episodes, with seconds counted since `begin` or the previous call."""
        ended, self._ended = self._ended, []
        (again, tokens), self._read_again, self._read = (self._read_again, self._read), 0, 0
        histories = [len(completion.histories) for completion in rollout.completions if completion.histories]
        return {
            "time/tool_wait_s": (self._events.waited_s(), 1),
            "agent/seconds": (sum(seconds for seconds, _ in ended) / max(len(ended), 1), len(ended)),
            "agent/failed_frac": (sum(failed for _, failed in ended) / max(len(ended), 1), len(ended)),
            "agent/read_again_frac": (again / max(tokens, 1), tokens),
            "agent/histories": (sum(histories) / max(len(histories), 1), len(histories)),
        }

    # What the endpoint calls, on its own thread. Nothing here waits.

    def model(self) -> dict[str, Any]:
        """Return the maximum number of tokens of a history, and where the tokenizer is, in the words of vLLM."""
        longest = max((play.longest for play in [*self._of_key.values()]), default=0)
        return {"max_model_len": longest, "root": self._tokenizer.name_or_path}

    def admit(self, key: str) -> tuple[Play, str]:
        """Return the episode with this key, and the attempt that asks. Raises Refused if there is none."""
        own, _, attempt = key.partition(".")
        play = self._of_key.get(own)
        if play is None:
            raise Refused(401, "the key is not that of an episode under way", "invalid_api_key")
        return play, attempt

    def read(self, path: str, body: Any) -> Ask:
        """Return what a body asks for at a path. Raises Refused."""
        return read(path, body, self._config, self._stop_ids, self._vocabulary)

    def take(self, episode: tuple[Play, str], ask: Ask, answer: Answer) -> None:
        """Take a request."""
        self._events.put(partial(self._asked, *episode, ask, answer))

    def leave(self, episode: tuple[Play, str], answer: Answer) -> None:
        """Learn that a client has gone before its request was answered."""
        self._events.put(partial(self._left, episode[0], answer))

    # What the decoder asks; see `Turns`.

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def begin(self, requests: Items[Request]) -> None:
        """Start an episode for every completion. Those of an earlier call are abandoned."""
        self._endpoint = self._endpoint or Endpoint(self)
        self._close()
        self._ended, self._begun = [], {}
        self._events.waited_s()
        self._plays = []
        for index, request in enumerate(requests):
            prompt, longest = request.prompt, request.max_total_tokens
            assert prompt is not None and longest is not None, "an episode has a task and a limit"
            self._plays.append([Play(index, k, key, prompt, longest) for k, key in enumerate(request.keys)])
        self._open = {play for group in self._plays for play in group}
        self._of_key = {secrets.token_urlsafe(24): play for group in self._plays for play in group}
        for key, play in self._of_key.items():
            prompt, text = play.prompt, play.prompt.text
            shown = [{"type": "image_url", "image_url": {"url": picture.url}} for picture in prompt.pictures]
            task = {**prompt.columns, "prompt": filled(placed(text, len(shown)), shown) if shown else text}
            call = Call({"task": [task], "url": [f"{self._endpoint.url}/v1"], "key": [key]}, [None])
            self._run(call).add_done_callback(partial(self._returned, play))

    def _returned(self, play: Play, future: Any) -> None:
        if not future.cancelled():
            self._events.put(partial(self._outcome, play, future.result()))

    def completions(self) -> list[list[Completion]]:
        self._close()
        return [[play.completion for play in group if play.completion] for group in self._plays]

    def _close(self) -> None:
        """Take no more requests, and refuse those that wait."""
        self._of_key, self._open = {}, set()
        for history in self._sampling.values():
            if history.ask is not None and history.answer is not None:
                history.answer(_over())
        self._sampling = {}
        self.answers(0.0)

    def answers(self, patience_s: float) -> Ready:
        ready: Ready = []
        while (event := self._events.next(0.0 if ready else patience_s)) is not None:
            ready += event()
        return ready

    def _asked(self, play: Play, attempt: str, ask: Ask, answer: Answer) -> Ready:
        """Begin the turn that an agent asks for, or refuse it."""
        if play not in self._open or play.outcome is not None:
            answer(_over())
            return []
        ready: Ready = []
        if attempt != play.attempt:
            ready += stopped(play.histories)
            play.attempt, play.dropped, play.histories = attempt, play.dropped + play.histories, []
            play.turns, play.sampled, play.is_cut = 0, 0, False
        try:
            history, new = self._history(play, ask)
        except Refused as refusal:
            play.is_cut |= refusal.code == _TOO_LONG
            answer(refusal)
            return ready
        history.ask, history.answer, history.turn, play.turns = ask, answer, play.turns, play.turns + 1
        return [*ready, (history.sequence if history.sequence.tokens == [] else history.sequence.key, new)]

    def _history(self, play: Play, ask: Ask) -> tuple[History, list[int]]:
        """Return the history that a request continues, or a new one, and the tokens that follow it. Raises Refused."""
        config = self._config
        under_way = sum(history.sequence.turn_limit for history in play.histories if history.ask is not None)
        room = config.max_completion_tokens - play.sampled - under_way
        refuse(play.turns >= config.max_turns, f"rollout.max_turns is {config.max_turns}", _TOO_LONG)
        refuse(room <= 0, f"rollout.max_completion_tokens is {config.max_completion_tokens}", _TOO_LONG)
        tools = json.dumps(ask.tools, sort_keys=True)
        history, new, pictures = self._continued(play, ask, tools)
        # By what is asked and not by when, since of requests at the same time any may come first.
        asked = stream_key(play.key, tools, _as_text(ask.chat or ask.ids))
        stream = stream_key(asked, play.asked[asked])
        if history is None:
            most = config.max_completion_tokens
            of = Sequence(play.request, play.sample, stream, [], 0, most, max_total_tokens=play.longest)
            repeats = max((begin_alike(new, h.sequence.tokens) for h in play.histories), default=0)
            history = History(play, of, tools, repeats)
        read = len(history.sequence.tokens) + len(new)
        refuse(read >= play.longest, f"{read} tokens leave no room in the {play.longest} of a history", _TOO_LONG)
        history.sequence.turn_limit = min(room, ask.limit or room, config.max_turn_tokens or room)
        history.sequence.stream, history.sequence.stream_begin = stream, len(history.sequence.logp)
        history.sequence.reported = () if ask.records else None
        history.pictures += pictures
        play.asked[asked] += 1
        if history.sequence.key not in self._sampling:
            self._sampling[history.sequence.key] = history
            play.histories.append(history)
        return history, new

    def _continued(self, play: Play, ask: Ask, tools: str) -> tuple[History | None, list[int], list[Picture]]:
        """Return the longest history that a request continues, and what follows it; without one, all its tokens. And
        the pictures among these."""
        free = [history for history in play.histories if history.ask is None]
        if ask.chat is None:
            assert ask.ids is not None
            read = [(len(h.sequence.tokens), h) for h in free if begins(ask.ids, h.sequence.tokens)]
            count, history = max(read, key=lambda of: of[0], default=(0, None))
            return history, ask.ids[count:], []
        said = [(len(h.chat), h) for h in free if h.chat and h.tools == tools and begins(ask.chat, h.chat)]
        count, history = max(said, key=lambda of: of[0], default=(0, None))
        try:
            template, _ = self._of_tools(tools, ask.tools)
            if history is not None and all(message["role"] in _FOLLOWS for message in ask.chat[count:]):
                chat, pictures = self._bared(template, ask, count)
                return history, template.ids(history.sequence.tokens[-1], chat, pictures), pictures
            text = _as_text(ask.chat) + tools
            if text not in self._begun:
                chat, pictures = self._bared(template, ask, 0)
                self._begun[text] = template.whole(chat, pictures), pictures
            ids, pictures = self._begun[text]
            return None, [*ids], pictures
        except Exception as error:  # a template is a program of the model's authors, and may refuse anything
            raise Refused(400, f"the chat cannot be read: {error}") from error

    def _bared(self, template: TurnTemplate, ask: Ask, begin: int) -> tuple[list[Message], list[Picture]]:
        """Return the messages of a chat from `begin` on, and their pictures."""
        pairs = [bared(message) for message in (ask.chat or [])[begin:]]
        files = [file for _, inside in pairs for file in inside]
        if files and (self._seen is None or self._seen[0].empty):
            raise ValueError("it has pictures: take a policy.model that sees, and set the function's shows_pictures")
        return [message for message, _ in pairs], template.read(files, "the chat")

    def _of_tools(self, tools: str, schemas: Items[dict[str, Any]]) -> tuple[TurnTemplate, Reader | None]:
        """Return what the template writes with these tools, and what reads their calls; None without tools."""
        if tools not in self._known:
            config = self._config
            template = TurnTemplate(self._tokenizer, self._variables, [*schemas], self._stop_ids, self._seen)
            reader = reader_of(template, config.tool_format, config.max_turn_calls) if schemas else None
            self._known[tools] = template, reader
        return self._known[tools]

    def ended(self, key: int, turn_ids: list[int], room: int) -> Finish | None:
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
        template, reader = self._known[history.tools]
        turn = turn_of(template, reader, ids)
        texts = [self._tokenizer.decode([token]) for token in ids] if ask.chat and ask.has_logprobs else []
        before = sequence.tokens[: sequence.begin] if ask.has_ids else []
        id = f"turn-{history.turn}"
        history.said.append((id, ask.role, len(sequence.logp)))
        records = recorded(ask.records, sequence.reported or (), len(ids))
        logp = sequence.logp[-len(ids) :]
        sampled = Sampled(id, turn, before, ids, logp, texts, sequence.begin, finish, records)
        if ask.chat is not None:
            history.chat = [*ask.chat, remembered(sampled)]
        answer(sampled)
        return None

    def _left(self, play: Play, answer: Answer) -> Ready:
        """Cut the turn whose client has gone."""
        return stopped([history for history in play.histories if history.answer is answer and history.ask is not None])

    def _outcome(self, play: Play, reply: Reply) -> Ready:
        """Take what an agent returned, and end its histories."""
        if play not in self._open:
            return []  # of a rollout that was given up
        play.outcome = reply = checked(play, reply)
        failure = reply.failures[0]
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
        history = self._sampling.pop(key)
        play, history.completion = history.play, completion
        self._read += len(history.sequence.tokens) - len(completion.token_ids) - history.sequence.known
        self._read_again += max(0, history.repeats - history.sequence.known)
        if play.outcome is None or any(h.completion is None for h in play.histories + play.dropped):
            return None
        play.completion = joined(play, play.outcome, self._reward)
        self._open.discard(play)
        return play.completion


def _over() -> Refused:
    return Refused(409, "the episode has ended", "closed")
