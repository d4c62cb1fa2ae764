"""What a worker sends is read as the data of a stranger: as a reply to its own call, or as none."""

import json
import math
import random
from dataclasses import replace

import pytest

from hybrid_grpo.config import RewardConfig
from hybrid_grpo.data.episodes import PLACE, Observation
from hybrid_grpo.distributed.workers.calls import Failure, Reply
from hybrid_grpo.distributed.workers.messages import PendingCall, decode_reply, encode_reply
from hybrid_grpo.rewards.functions import RewardEntry
from hybrid_grpo.turns.environments.in_worker import EnvironmentEntry
from hybrid_grpo.turns.observations import sent
from hybrid_grpo.turns.tools.functions import ToolEntry

EVENTS = EnvironmentEntry("a:B")
CALLS = {
    7: PendingCall(RewardEntry(RewardConfig("exact_match")), [3, 5], 7, b""),
    8: PendingCall(ToolEntry("calculator"), [None], 8, b""),
    **{9 + k: PendingCall(EVENTS, [do], 9 + k, b"") for k, do in enumerate(("begin", "call", "step", "end", "close"))},
}
WRONG = [None, True, -1, 0.5, 1e400, -1e400, math.nan, 10**30, "1.0", "\udce9", [], [1], [[9, 1.0]], {}, {"a": 1}]
FAILURE = {"kind": "raised", "message": "raised", "traceback": ""}
SAID = Observation(f"said{PLACE}", (b"a picture",))
STATE = {"place": "a", "class": "b", "attributes": {"x": "y"}, "missing": {}}


def as_sent(value):
    if isinstance(value, dict) and "said" in value:
        return {**value, "said": as_sent(value["said"])}
    return sent(value) if isinstance(value, Observation) else value


def test_replies_come_back_as_they_were_sent():
    for number, reply in (
        (7, Reply([1.5, [(2, 1.0), (5, -1.0)]], [None, None], {"a": [1, "x"], "b": [None, 0.5]})),
        (7, Reply([None, 2.0], [Failure("raised", "why", "trace"), None], whole=True)),
        (8, Reply([SAID], [None])),
        (8, Reply([None], [Failure("died", "why")], spent=True)),
        (11, Reply([{"said": SAID, "reward": None, "done": False}], [None])),
        (12, Reply([{"reward": 1.0, "state": STATE}], [None])),
    ):
        by_worker = replace(reply, values=list(map(as_sent, reply.values)))
        assert decode_reply(encode_reply(number, by_worker), CALLS) == (number, reply)
    assert decode_reply(encode_reply(6, Reply([1.0], [None])), CALLS) is None


@pytest.mark.parametrize("message", [
    b"", b"[" * 100_000, b"7", b"[7, [1.0], {}, {}, false, false]", b"[7, [1.0, 2.0, 3.0], {}, {}, false, false]",
    b"[7, [1.0, Infinity], {}, {}, false, false]", b'[7, [1.0, "1.0"], {}, {}, false, false]',
    b"[7, [1.0, [[6, 1.0]]], {}, {}, false, false]",
    b'[7, [1.0, 2.0], {"0": {"kind": "forged", "message": "", "traceback": ""}}, {}, false, false]',
    b"[7, [1.0, 2.0], [[]], {}, false, false]", b'[7, [1.0, 2.0], {}, {"a": 1}, false, false]',
    b"[8, [0.0], {}, {}, false, false]", b'[8, [{"text": "a", "pictures": ["AAAA"]}], {}, {}, false, false]',
    b'[8, [{"text": "\\ufffc", "pictures": ["A"]}], {}, {}, false, false]', b"[8, [], {}, {}, false, false]",
    b'[11, [{"said": {"text": "a", "pictures": []}, "reward": "1", "done": true}], {}, {}, false, false]',
    b'[11, [{"said": {"text": "a", "pictures": []}}], {}, {}, false, false]',
    b'[12, [{"reward": 1.0, "state": []}], {}, {}, false, false]',
])  # fmt: skip
def test_what_is_no_reply_is_refused_with_a_single_kind_of_error(message):
    with pytest.raises(ValueError, match="no reply"):
        decode_reply(message, CALLS)


def test_forged_parts_in_all_places_become_plain_values_or_no_reply():
    """Forged types, lengths, infinities and text reached the rank, and ended the run."""
    draw, accepted = random.Random(0), 0
    for _ in range(20_000):
        said = {"text": "a", "pictures": []}
        end = {"reward": 1.0, "state": STATE}
        event = {"said": said, **said, "reward": 1.0, "done": True, "end": end, "state": STATE}
        reply = [draw.choice([*CALLS]), [event], {}, {"a": [1]}, False, False]
        if draw.random() < 0.5:
            reply = [7, [1.0, 2.0], {"1": dict(FAILURE)}, {"a": [1, "b"]}, False, False]
        for _ in range(draw.randint(1, 2)):
            at = reply
            while isinstance(at, list | dict) and at:
                key = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
                if draw.random() < 0.4 or not isinstance(at[key], list | dict):
                    at[key] = json.loads(json.dumps(draw.choice(WRONG)))
                    break
                at = at[key]
        try:
            decoded = decode_reply(json.dumps(reply).encode(), CALLS)
        except ValueError:
            continue
        if decoded is None:
            continue
        accepted += 1
        number, found = decoded
        rows = len(CALLS[number].expected)
        assert len(found.values) == len(found.failures) == rows
        for value, failure in zip(found.values, found.failures, strict=True):
            assert value is None or failure is None
            is_number = type(value) is float and math.isfinite(value)
            kind = list if number == 7 else Observation if number == 8 else dict
            assert is_number or value is None or isinstance(value, kind)
        assert all(len(column) == rows for column in found.extra.values())
        json.dumps(found.extra, ensure_ascii=False).encode()
        "".join(failure.message for failure in found.failures if failure).encode()
        if CALLS[number].entry is EVENTS and not any(found.failures):
            said = found.values[0].get("said")
            assert said is None or isinstance(said.text, str)
    assert accepted > 1000


def test_what_is_stored_with_completions_has_limits():
    extra = {f"column {k}": ["x" * 100_000, "\ud800"] for k in range(100)}
    _, reply = decode_reply(encode_reply(7, Reply([1.0, 2.0], [None, None], extra)), CALLS)
    assert len(json.dumps(reply.extra)) < 1_000_000 and len(reply.extra) == 64
    assert reply.extra["column 0"] == ["x" * 10_000, "?"]
