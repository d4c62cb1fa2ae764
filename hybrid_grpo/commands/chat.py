"""`chat`: holds a conversation in the terminal or through a pipe. Each line of the input is a message.

The answers go to standard output, everything else to standard error. One process holds the whole model; no engine runs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_grpo.commands.arguments import is_run, options_of_run
from hybrid_grpo.commands.configs import ChatConfig
from hybrid_grpo.config.checks import check_policy
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.parsing import leading_argument, parse

if TYPE_CHECKING:
    from hybrid_grpo.commands.conversation import ChatHistory

COMMAND = "chat MODEL"
Answer = Callable[[list[int], int, Callable[[str], None]], tuple[str, str]]
"""Samples an answer. Takes the tokens of the prompt, the answer's number, which selects its random numbers, and a
function that receives the text piece by piece. Returns the whole text, and why it is incomplete ("" if it is not)."""
_COMMANDS = {
    "/reset": "forget the conversation", "/system TEXT": "set the system prompt; without TEXT, use none",
    "/image PATH": "show a picture with the next message", "/undo": "take back the last message and its answer",
    "/save FILE": "append the conversation to a file of JSON lines, as a row for sft",
    "/quit": "end, as Ctrl-D does; Ctrl-C stops an answer",
}  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters with which a text could control a terminal; line feeds and tabs are harmless."""


class _Stopped(Exception):
    """The answer was stopped with Ctrl-C."""


def run(arguments: list[str]) -> None:
    """Parse the arguments, load the model and chat until the input ends, or until the output's reader closes it."""
    name, options = leading_argument(arguments, f"{COMMAND} [--chat.system TEXT] [options]")
    defaults = options_of_run(name) if is_run(name) else ["--policy.model", name] if name else []
    arguments = [*defaults, *options]
    config = parse(ChatConfig, arguments, COMMAND).config
    check_policy(config.policy)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    refuse(ranks > 1, f"chat runs in one process, but there are {ranks} ranks: start it without a launcher")
    if not is_run(name):
        from hybrid_grpo.model.limits import own_sampling

        own = [f"--rollout.{setting}={value}" for setting, value in own_sampling(str(config.policy.model)).items()]
        config = parse(ChatConfig, [*own, *arguments], COMMAND).config
    terminal = _Terminal(*_loaded(config))
    # From here on Ctrl-C is for the conversation.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    terminal.talk()


def _loaded(config: ChatConfig) -> tuple[ChatHistory, Answer]:
    """Load the model; return an empty conversation and the function that samples answers. Raises UserError."""
    import torch

    from hybrid_grpo.commands.conversation import ChatHistory, TextStream
    from hybrid_grpo.data.completions import unended_turn
    from hybrid_grpo.data.pictures import sight_of
    from hybrid_grpo.generation import Callbacks, Request, stream_key
    from hybrid_grpo.generation.rollout import attention_of, complete, sampling_of
    from hybrid_grpo.model.limits import check_prompt_ids
    from hybrid_grpo.model.loading import load_model
    from hybrid_grpo.model.reading import Reading
    from hybrid_grpo.run.sampling import SamplingContext

    rollout = config.rollout
    sampler = SamplingContext.read(config.policy, rollout)
    tokenizer = sampler.tokenizer
    text_config = sampler.model_config.get_text_config(decoder=True)
    positions = getattr(text_config, "max_position_embeddings", None) or sys.maxsize
    has = f"policy.model has {positions} positions"
    if rollout.max_total_tokens is not None and rollout.max_total_tokens < positions:
        positions, has = rollout.max_total_tokens, f"rollout.max_total_tokens is {rollout.max_total_tokens}"
    refuse(
        rollout.max_completion_tokens >= positions,
        f"rollout.max_completion_tokens {rollout.max_completion_tokens} leaves no room for a message: {has}: set it to"
        f" {max(1, positions // 2)} or lower",
    )
    history = ChatHistory(config.data, tokenizer, positions - rollout.max_completion_tokens, sampler.album)
    history.instruct(config.data.system_prompt if config.chat.system is None else config.chat.system)
    # A mistake in the template or the system prompt is reported before the weights are read.
    if history.templated:
        history.prompt_ids("hello")
    warns = history.templated and not rollout.ignore_eos
    warning = unended_turn(tokenizer, sampler.stop_ids, rollout.stop_strings) if warns else ""
    sampled = f"{sampler.fact}\n{warning}".strip()
    print(f"model: {config.policy.model}\nsampling: run.seed {config.run.seed}, {sampled}", file=sys.stderr)
    model = load_model(config.policy, attention_of(rollout.decoder))
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    decode, sampling = partial(tokenizer.decode, skip_special_tokens=True), sampling_of(rollout, sampler.stop_ids)
    sight = cache(partial(sight_of, sampler.album, config.policy, next(model.parameters()).device))

    def answer(prompt_ids: list[int], number: int, write: Callable[[str], None]) -> tuple[str, str]:
        check_prompt_ids([prompt_ids], sampler.model_config)
        stream, why = TextStream(decode), "stopped"
        requests = [Request(prompt_ids, [stream_key(config.run.seed, "chat", number)])]

        def show(request: int, sample: int, token: int) -> None:
            write(stream.add(token))

        with _interruptible() as look, suppress(_Stopped):
            seen = sight() if min(prompt_ids) < 0 else None
            callbacks = Callbacks(on_step=look, on_token=show, reading=Reading(seen))
            groups, _ = complete(model, tokenizer, requests, sampling, rollout, callbacks)
            cut = groups[0][0].finish == "length"
            limit = min(("max_turn_tokens", "max_completion_tokens"), key=lambda n: getattr(rollout, n) or sys.maxsize)
            why = f"cut at rollout.{limit} {getattr(rollout, limit)}" if cut else ""
        return stream.text, why

    return history, answer


@contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """Inside this context, Ctrl-C is only recorded; the yielded function raises _Stopped once it has been pressed."""
    asked = False

    def note(*_: Any) -> None:
        nonlocal asked
        asked = True

    def look() -> None:
        if asked:
            raise _Stopped

    before = signal.signal(signal.SIGINT, note)
    try:
        yield look
    finally:
        signal.signal(signal.SIGINT, before)


class _Terminal:
    def __init__(self, history: ChatHistory, answer: Answer) -> None:
        self._history, self._answer = history, answer
        self._typed = sys.stdin.isatty()
        self._shown = sys.stdout.isatty()
        self._answers = self._left_out = 0

    def talk(self) -> None:
        """Read and process lines until the input ends or a line is /quit."""
        if self._typed:
            says = "a chat" if self._history.templated else "plain text that the model continues"
            self._say(f"{says}; /help lists the commands")
        for line in self._lines():
            if not line.strip():
                continue
            try:
                if line.startswith("/"):
                    command, _, rest = line.partition(" ")
                    if command == "/quit":
                        return
                    self._obey(command, rest.strip())
                else:
                    self._reply(line)
            except UserError as error:
                if not self._typed:
                    raise
                self._say(f"error: {error}")
            except KeyboardInterrupt:
                # Ctrl-C came just before or after the answer.
                if not self._typed:
                    raise

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the input without their line ends."""
        if not self._typed:
            for number, data in enumerate(sys.stdin.buffer, start=1):
                try:
                    yield data.decode("utf-8-sig").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise UserError(f"standard input, line {number}, is not UTF-8: {error}: convert it") from None
            return
        with suppress(ImportError):
            import readline  # noqa: F401  # gives input() its editing and history
        while True:
            try:
                # If answers go to a file, the prompt sign must not be in it.
                yield input("> " if self._shown else "")
            except EOFError:
                print(file=sys.stderr)
                return
            except KeyboardInterrupt:
                self._say("\n/quit or Ctrl-D ends the conversation")

    def _obey(self, command: str, rest: str) -> None:
        talk = self._history
        match command, rest:
            case "/reset", "":
                talk.turns.clear()
                talk.pictures.clear()
            case "/image", _ if rest:
                talk.show(rest)
            case "/system", _:
                talk.instruct(rest or None)
            case "/undo", "":
                refuse(not talk.turns, "there is nothing to take back")
                talk.turns.pop()
            case "/save", _ if rest:
                refuse(not talk.turns, "there is nothing to save")
                try:
                    with Path(rest).expanduser().open("a", encoding="utf-8") as file:
                        file.write(json.dumps(talk.row(), ensure_ascii=False) + "\n")
                except OSError as error:
                    raise UserError(f"{rest} cannot be written: {error.strerror}") from None
                self._say(f"appended to {rest}")
            case "/help", _:
                self._say("\n".join(f"{name:13} {what}" for name, what in _COMMANDS.items()))
            case _:
                raise UserError(
                    f"{command} {rest}".rstrip()
                    + f" is not a command: known are {', '.join(_COMMANDS)}; a message may begin with a space"
                )

    def _reply(self, message: str) -> None:
        said = self._history.said(message)
        prompt_ids, left_out = self._history.prompt_ids(said)
        if left_out > self._left_out:
            self._say(f"the model's context is full: the oldest {left_out} messages and answers are left out")
        self._left_out = left_out
        self._answers += 1
        answer, why = self._answer(prompt_ids, self._answers, self._show)
        self._show("\n")
        if why:
            self._say(f"[{why}]")
        self._history.turns.append((said, answer))
        self._history.pictures.clear()

    def _show(self, text: str) -> None:
        if text:
            if self._shown:
                text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
            sys.stdout.buffer.write(text.encode("utf-8", errors="replace"))
            sys.stdout.buffer.flush()

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)
