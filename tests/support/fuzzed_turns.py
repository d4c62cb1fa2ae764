"""Turns at random, as bad models write them: pieces of a format's own marks, its well-formed calls cut and spliced,
deep nesting, halves of surrogate pairs, numbers without end, and names and thoughts in wrong places."""

# ruff: noqa: RUF001
import random
from collections.abc import Iterator

from written_calls import WRITTEN

_MARKS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "[TOOL_CALLS]"),
    *("[CALL_ID]", "[ARGS]", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>", "functions.f:0"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json\n", "```"),
    *("<|tool_call>", "call:f{", "<tool_call|>", '<|"|>', "<minimax:tool_call>", '<invoke name="f">', "</invoke>"),
    *('<parameter name="a">', "<|tool_call|>", "functools[", "<function_calls>", "</function_calls>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>thought", "<channel|>"),
]
_BITS = [
    *('{"name": "f", "arguments": {', '{"name": ', '"arguments": null', '{"a": 1}', '"\\ud83d"', "\ud83d", "\x00"),
    *("\n", "[f(a=", "f(", "b'z'", "'x'", "'''", "1e999", "NaN", "-Infinity", "9" * 5000, "0x" + "f" * 5000, "{"),
    *("}", "[", "]", "(", ")", "'", '"', "\\", ",", ":", "=", ";", "é🎉", "\U000f0000", "\U000f0002", "a" * 300, " "),
    *("True", "null"),
]


def fuzzed(name: str, count: int, seed: int = 0) -> Iterator[str]:
    """So many turns in the manner of a format."""
    rng = random.Random(f"{name}/{seed}")
    texts = [text for text, _ in WRITTEN[name]]
    marks = sorted({mark for mark in _MARKS for text in texts if mark in text}) or _MARKS
    for _ in range(count):
        kind = rng.random()
        if kind < 0.3:
            yield "".join(rng.choice(rng.choice([marks, _MARKS, _BITS])) for _ in range(rng.randint(1, 12)))
        elif kind < 0.8:
            yield _spoiled(rng.choice(texts), rng.choice(texts), rng, marks)
        elif kind < 0.98:
            yield "".join(
                chr(rng.choice([rng.randrange(128), rng.randrange(0x11000)])) for _ in range(rng.randint(0, 60))
            )
        else:
            yield _deep(rng.choice(texts), rng)


def _spoiled(text: str, other: str, rng: random.Random, marks: list[str]) -> str:
    """A turn with pieces cut out, put in, doubled, or taken from another."""
    for _ in range(rng.randint(1, 4)):
        begin, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        there = rng.randrange(len(other) + 1)
        piece = rng.choice(
            ["", text[begin:end] * 2, other[there : there + end - begin], rng.choice(marks), rng.choice(_BITS)]
        )
        text = text[:begin] + piece + (text[end:] if rng.random() < 0.5 else text[begin:])
    return text


def _deep(text: str, rng: random.Random) -> str:
    """A turn with something that nests deeply, or repeats, in its middle."""
    place, times = rng.randrange(len(text) + 1), rng.choice([70, 960, 1000, 4000])
    unit = rng.choice(
        ['{"a":', "[", "{a:", "(", "-", "not ", "f(a=", "{", "<think>", "<tool_call>", "[TOOL_CALLS]", "<function="]
    )
    return text[:place] + unit * times + text[place:]
