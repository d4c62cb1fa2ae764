"""What programs ask for over HTTP, and what they get: OpenAI's chat completions, and vLLM's generation from tokens.

A request may not change how tokens are drawn, since the policy learns from them: settings of sampling are those of the
run, and a request that asks for others is refused.
"""

import json
import math
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException

from hybrid_grpo.config import RolloutConfig
from hybrid_grpo.data.chat_template import clean, joined
from hybrid_grpo.data.completion import Message
from hybrid_grpo.data.pictures import has_images
from hybrid_grpo.model.routing import Routing
from hybrid_grpo.model.sidecars import Sidecar, find
from hybrid_grpo.model.support import SamplingMask
from hybrid_grpo.turns.calls import Turn

MODEL = "policy"
"""The name under which the policy is served. Requests may give any other, as the role that is played."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NEUTRAL = {"n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "min_tokens": 0}
"""Settings that have no counterpart here, with the value that changes nothing."""
_RECORDS = ("return_sampling_mask", "return_routed_experts", "routed_experts_prompt_start")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Refused(HTTPException):
    """Why a request is not answered: a status of HTTP, and a line for the program."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(status, message)
        self.code = code


@dataclass(frozen=True)
class Ask:
    """A turn that a program asks for, after a chat or after tokens."""

    role: str = MODEL
    """The model that the program named."""
    chat: list[Message] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the tools that the chat names."""
    ids: list[int] | None = None
    limit: int | None = None
    """Maximum number of tokens to sample, if the program gave one."""
    has_logprobs: bool = False
    """Whether a chat's reply has log-probabilities; after tokens it always has."""
    is_streamed: bool = False
    has_ids: bool = False
    """Whether a chat's reply has its tokens, as with vLLM."""
    records: Mapping[str, Any] = field(default_factory=dict)
    """What a reply after tokens has of the sampler's records: those of `_RECORDS` that the program gave."""


@dataclass(frozen=True)
class Sampled:
    """The turn that a program gets."""

    id: str
    turn: Turn
    before: list[int]
    """The tokens before the turn; empty unless the program wants them."""
    ids: list[int]
    logp: list[float]
    tokens: list[str]
    """The texts of `ids`; empty if the program wants no log-probabilities."""
    read: int
    """Number of tokens before the turn."""
    finish: str
    """`stop` or `length`."""
    records: dict[str, Any]
    """What was `recorded` of it."""


def read(path: str, body: Any, config: RolloutConfig, stop_ids: Sequence[int], vocabulary: int) -> Ask:
    """Return what a body asks for at a path: a turn after tokens, below the number `vocabulary`, or after a chat.
    Raises Refused."""
    try:
        return _after_tokens(body, config, stop_ids, vocabulary) if path.endswith("generate") else _chat(body, config)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not of the API: {type(error).__name__}: {error}") from error


def _chat(body: dict[str, Any], config: RolloutConfig) -> Ask:
    _check(body, config)
    tools, choice = body.get("tools") or [], body.get("tool_choice") or "auto"
    refuse(not body["messages"], "messages has at least one message")
    refuse(choice not in ("auto", "none"), "tool_choice is auto or none: the policy chooses what it writes")
    kind = (body.get("response_format") or {"type": "text"})["type"]
    refuse(kind != "text", "response_format is text: the policy chooses what it writes")
    refuse(not all(isinstance(tool["function"]["name"], str) for tool in tools), "a tool is a function with a name")
    names: dict[str, str] = {}
    return Ask(
        str(body.get("model") or MODEL), [_message(message, names) for message in body["messages"]],
        () if choice == "none" else tuple(tools), limit=_limit(body), has_logprobs=bool(body.get("logprobs")),
        is_streamed=bool(body.get("stream")), has_ids=bool(body.get("return_token_ids")),
    )  # fmt: skip


def _after_tokens(body: dict[str, Any], config: RolloutConfig, stop_ids: Sequence[int], vocabulary: int) -> Ask:
    ids, sampling = body["token_ids"], body.get("sampling_params") or {}
    known = isinstance(ids, list) and all(type(token) is int and 0 <= token < vocabulary for token in ids)
    refuse(not ids or not known, f"token_ids has at least one token, all below {vocabulary}")
    refuse(bool(body.get("features")), "features: pictures are taken in chats, as image_url with a data: URL")
    _check(sampling, config)
    for token in sampling.get("stop_token_ids") or ():
        refuse(token not in stop_ids, f"stop_token_ids {token} ends no turn: set rollout.stop_ids [{token}]")
    records = {name: int(value) for name in _RECORDS if (value := {**sampling, **body}.get(name))}
    refuse("return_sampling_mask" in records and config.logprobs != "mask", "masks are kept with rollout.logprobs mask")
    return Ask(str(body.get("model") or MODEL), ids=ids, limit=_limit(sampling), records=records)


def refuse(condition: bool, message: str, code: str = "invalid_request") -> None:
    """Raise Refused, as the fault of the program that asks, if the condition holds."""
    if condition:
        raise Refused(400, message, code)


def _check(asked: Mapping[str, Any], config: RolloutConfig) -> None:
    """Refuse settings that would sample from another distribution than the run's."""
    for name in _SAMPLING:
        value, own = asked.get(name), getattr(config, name)
        value = 0 if name == "top_k" and value == -1 else value  # off in vLLM
        refuse(value is not None and value != own, f"{name} {value!r} is not that of the run: leave it out, or {own}")
    for name, neutral in _NEUTRAL.items():
        refuse(asked.get(name) not in (None, neutral), f"{name} {asked.get(name)!r} is not supported: leave it out")
    stops = asked.get("stop") or []
    for text in [stops] if isinstance(stops, str) else stops:
        refuse(text not in config.stop_strings, f"stop {text!r} ends no turn: set rollout.stop_strings")


def _limit(asked: Mapping[str, Any]) -> int | None:
    limit = asked.get("max_tokens") if asked.get("max_completion_tokens") is None else asked["max_completion_tokens"]
    refuse(limit is not None and (type(limit) is not int or limit < 1), f"max_tokens {limit!r} is not 1 or more")
    return limit


def _message(message: dict[str, Any], names: dict[str, str]) -> Message:
    """Return a message with what templates read, and nothing else, so that equal ones are equal. `names` has the tools
    of the calls so far, by the calls' ids."""
    role, content = _ROLES[message["role"]], message.get("content") or ""
    made: Message = {"role": role, "content": [*map(_part, [content] if isinstance(content, str) else content)]}
    made["content"] = made["content"] if has_images(made) else joined(made["content"])
    if role == "assistant" and message.get("tool_calls"):
        made["tool_calls"] = [_call(call, names) for call in message["tool_calls"]]
    if role == "tool":
        id = str(message["tool_call_id"])
        made |= {"name": str(message.get("name") or names.get(id, "")), "tool_call_id": id}
    return made


def _part(part: Any) -> dict[str, Any]:
    """Return a part of a content; that of a picture has the bytes of its file."""
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return {"type": "text", "text": clean(joined([part]))}
    head, _, data = (url := part["image_url"]["url"]).partition(",")
    is_file = head.startswith("data:") and head.endswith(";base64")
    refuse(not is_file, f"image_url {url:.60} is not fetched: send the picture itself, as data:image/png;base64,...")
    return {"type": "image", "image": b64decode(data, validate=True)}


def _call(call: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    id, name, arguments = str(call["id"]), str(call["function"]["name"]), call["function"]["arguments"]
    names[id] = name
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}


def _said_by(sampled: Sampled) -> Message:
    """Return a turn as the message that a program gets, and sends back in its next request."""
    calls = [
        {
            "id": call.id or f"c{sampled.read % 10_000:04d}{k:04d}",  # nine letters, which Mistral's template asks for
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for k, call in enumerate(sampled.turn.calls)
    ]
    return {"role": "assistant", "content": clean(sampled.turn.content), **({"tool_calls": calls} if calls else {})}


def remembered(sampled: Sampled) -> Message:
    """Return a turn as it is read in the next request."""
    return _message(_said_by(sampled), {})


def _finish(sampled: Sampled) -> str:
    return "tool_calls" if sampled.turn.calls and sampled.finish == "stop" else sampled.finish


def _usage(sampled: Sampled) -> dict[str, int]:
    new = len(sampled.ids)
    return {"prompt_tokens": sampled.read, "completion_tokens": new, "total_tokens": sampled.read + new}


def _finite(logp: float) -> float:
    return logp if math.isfinite(logp) else -1e4


def chat_reply(sampled: Sampled) -> dict[str, Any]:
    """Return the body of a chat completion."""
    entries = [
        {"token": text, "logprob": _finite(logp), "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
        for text, logp in zip(sampled.tokens, sampled.logp, strict=False)
    ]
    choice = {
        "index": 0, "message": _said_by(sampled), "finish_reason": _finish(sampled),
        "logprobs": {"content": entries} if entries else None, **({"token_ids": sampled.ids} if sampled.before else {}),
    }  # fmt: skip
    asked = {"prompt_token_ids": sampled.before} if sampled.before else {}
    return {**_head(sampled, "chat.completion"), "choices": [choice], "usage": _usage(sampled), **asked}


def _head(sampled: Sampled, kind: str) -> dict[str, Any]:
    return {"id": sampled.id, "object": kind, "created": int(time.time()), "model": MODEL}


def chat_stream(sampled: Sampled) -> bytes:
    """Return the same as a stream of events, in which the turn is one piece: it can only be read once it has ended."""
    head, message = _head(sampled, "chat.completion.chunk"), _said_by(sampled)
    for k, call in enumerate(message.get("tool_calls", ())):
        call["index"] = k
    pieces: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish(sampled)}]},
        {**head, "choices": [], "usage": _usage(sampled)},
    ]
    return "".join(f"data: {text}\n\n" for text in (*map(json.dumps, pieces), "[DONE]")).encode()


def recorded(asked: Mapping[str, Any], sidecars: Sequence[Sidecar], new: int) -> dict[str, Any]:
    """Return what a reply of `new` tokens has of the sampler's records, in the form of vLLM. The last token, which has
    not been read yet, has no experts."""
    found: dict[str, Any] = {}
    if "return_sampling_mask" in asked and (mask := find(sidecars, SamplingMask)) is not None:
        found["sampling_mask"] = [ids.tolist() for ids in mask.lists()[-new:]]
    if "return_routed_experts" in asked and (routing := find(sidecars, Routing)) is not None:
        experts = routing.completion[(start := asked.get("routed_experts_prompt_start", 0)) :]
        data = b64encode(experts.tobytes()).decode()
        found["routed_experts"] = {"data": data, "shape": experts.shape, "dtype": experts.dtype.name, "start": start}
    return found


def tokens_reply(sampled: Sampled) -> dict[str, Any]:
    """Return the body of a generation from tokens."""
    pairs = zip(sampled.ids, sampled.logp, strict=True)
    content = [{"token": f"token_id:{token}", "logprob": _finite(logp)} for token, logp in pairs]
    choice = {"index": 0, "token_ids": sampled.ids, "finish_reason": sampled.finish, "logprobs": {"content": content}}
    choice |= {"text": sampled.turn.content, **sampled.records}
    return {"request_id": sampled.id, "choices": [choice], "usage": _usage(sampled)}
