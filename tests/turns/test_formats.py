"""Formats of calls: what models write is read, and nothing that they write makes a reader raise."""

import json
import time

import pytest
from fuzzed_turns import fuzzed
from written_calls import FAULT, SCHEMAS, WRITTEN

from hybrid_grpo.turns.calls import Call
from hybrid_grpo.turns.formats import FORMATS
from hybrid_grpo.turns.reading import format_reader

CASES = [(name, text, expected) for name, cases in WRITTEN.items() for text, expected in cases]


def read(name, text, begun="", most_calls=16):
    return format_reader(FORMATS[name], SCHEMAS, most_calls, begun)(text, "")


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_as_vllm_reads_them(name):
    wrong = []
    for text, expected in WRITTEN[name]:
        turn = read(name, text)
        found = [*turn.calls, *([FAULT] if turn.fault else [])]
        if found != expected or (not expected and turn.content != text):
            wrong.append((text, turn, expected))
    assert not wrong


def test_every_format_has_cases():
    assert WRITTEN.keys() == FORMATS.keys()
    assert min(map(len, WRITTEN.values())) >= 8


def check(turn):
    """Everything that handles a turn can: files, workers, templates and tokenizers."""
    json.dumps(
        [turn.content, [[call.name, call.arguments, call.id] for call in turn.calls], turn.fault], allow_nan=False
    )
    for call in turn.calls:
        assert isinstance(call, Call) and call.name and isinstance(call.arguments, dict)
        json.dumps([call.name, call.arguments], ensure_ascii=False).encode()
    assert turn.fault is None or len(turn.fault.encode()) <= 2000
    assert len(turn.calls) <= 16


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_that_a_model_writes_makes_a_reader_raise(name):
    """A RecursionError, and a TypeError for half of a surrogate pair, ended runs for good. `python
    benchmarks/tool_formats.py` reads 100,000 turns of each format."""
    kinds = set()
    for text in fuzzed(name, 1000):
        for begun in ("", "<think>\n"):
            start_s = time.process_time()
            turn = read(name, text, begun)
            assert time.process_time() - start_s < 2, text[:200]
            check(turn)
            kinds.add((bool(turn.calls), turn.fault is not None))
    assert kinds >= {(False, False), (True, False), (False, True)}
