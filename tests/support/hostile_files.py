"""Wrong, huge and hostile files for the folder of a run, for test_hostile.py.

`CASES` has functions by name, each of which damages a small healthy run (`write_run`) in a folder.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

LARGE = 10**8
"""About the size of files that are meant to be huge, in bytes."""
SECRET = "root:x:0:0"
"""A text in the file outside of the run to which links lead; no answer may contain it."""
EVIL = "</script><script>alert(1)</script>\x00\x1b[31m\u202e\ud800__proto__"
Case = Callable[[Path], None]
CASES: dict[str, Case] = {}
METRICS, TRACES, ALARMS, CONFIG = "metrics.jsonl", "details.jsonl", "alarms.jsonl", "config.yaml"
ROLLOUTS, TOKENS, REPLAY = "rollouts/step_000003.jsonl", "rollouts/step_000003.parquet", "replay/step_000003.parquet"
LINES: dict[str, dict[str, Any]] = {
    METRICS: {"step": 1, "reward/mean": 0.5, "time/step_s": 1.0, "completion/sampled_tokens": 100, "policy/entropy": 1},
    TRACES: {
        "step": 1, "prompts": [[1, 0.5, 0], [2, 0.25, 0]], "histograms": {"a": {"edges": [0, 1], "counts": [2]}},
        "stages": [[["generate", 0, 1]]], "decoder": [],
    },
    ALARMS: {"step": 1, "alarm": "parity", "since": 1, "message": "m"},
    ROLLOUTS: {"step": 3, "group": 1, "sample": 0, "prompt": "p", "completion": "c", "reward": 1.0, "finish": "stop"},
}  # fmt: skip
"""A good line of each file."""


def write_run(folder: Path, steps: int = 20) -> Path:
    """Write a healthy run."""
    for name, line in LINES.items():
        rows = ({**line, "step": step, "sample": step, "reward": step / steps} for step in range(steps))
        dense(folder / name, (json.dumps(row).encode() + b"\n" for row in rows))
    (folder / CONFIG).write_text("run: {steps: 100}\npolicy: {lr: 0.1}\n")
    (folder / ".lock").touch()
    rows = [{"row": row, "sample": row, "pieces": ["a", "b"], "logp": [-1.0, -2.0]} for row in range(steps)]
    parquet(folder / TOKENS, rows)
    parquet(folder / REPLAY, rows)
    return folder


def line(name: str, **other: Any) -> bytes:
    return json.dumps({**LINES[name], **other}).encode() + b"\n"


def raw(name: str, field: str, value: bytes, step: int = 1) -> bytes:
    """A line with a value that is already JSON, or is not."""
    return line(name, **{"step": step, field: "?!"}).replace(b'"?!"', value)


def dense(path: Path, parts: Iterable[bytes], size: float = float("inf")) -> None:
    """Write parts until the file has `size` bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb", 2**20) as file:
        for part in parts:
            file.write(part)
            if file.tell() >= size:
                return


def parquet(path: Path, rows: list[dict[str, Any]] | Any, **options: Any) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(exist_ok=True)
    table = pyarrow.Table.from_pylist(rows) if isinstance(rows, list) else rows
    pyarrow.parquet.write_table(table, path, **options)


def other_kind(folder: Path, name: str, kind: str) -> None:
    """Put a folder, a pipe or a link in the place of a file."""
    path = folder / name
    path.unlink(missing_ok=True)
    made: dict[str, Callable[[], None]] = {
        "folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "loop": lambda: path.symlink_to(path.name),
        "outside": lambda: path.symlink_to("/etc/passwd"),
    }  # fmt: skip
    made[kind]()


def case(name: str) -> Callable[[Case], Case]:
    return lambda function: CASES.setdefault(name, function)


@case(f"{ALARMS}: short lines")
def short(folder: Path) -> None:
    dense(folder / ALARMS, itertools.repeat(b"{}\n" * 10**4), LARGE // 50)


@case(f"{ROLLOUTS}: lines of many values")
def values(folder: Path) -> None:
    lists = (raw(ROLLOUTS, "extra", b"[" + b"[]," * 2_700_000 + b"0]", step) for step in range(10, 40))
    dense(folder / ROLLOUTS, lists, LARGE // 5)


@case(f"{TRACES}: lines of many keys")
def keys(folder: Path) -> None:
    many = b"{" + b",".join(b'"%d":0' % key for key in range(700_000)) + b"}"
    dense(folder / TRACES, (raw(TRACES, "rewards", many, step) for step in range(10, 40)), LARGE // 5)


@case(f"{TRACES}: scripts and control characters")
def scripts(folder: Path) -> None:
    fields = (*LINES[TRACES], EVIL)
    rows = [line(TRACES, step=at + 5, **{field: EVIL}) for at, field in enumerate(fields) if field != "step"]
    dense(
        folder / TRACES, [*rows, line(TRACES, step=50, **{"__proto__": 1, "constructor": 2, f"reward/{EVIL}/mean": 1})]
    )


@case(f"{METRICS}: loop")
def loop(folder: Path) -> None:
    other_kind(folder, METRICS, "loop")


@case(f"{CONFIG}: outside")
def outside(folder: Path) -> None:
    other_kind(folder, CONFIG, "outside")


def _config(name: str, content: bytes) -> None:
    CASES[f"config: {name}"] = lambda folder: dense(folder / CONFIG, [content])


_config("many tags", b"".join(b"%%TAG !%d! a\n" % number for number in range(50_000)) + b"---\na: 1\n")
_config("just short of 1 MiB", b"".join(b"a%d: {b: [1]}\n" % k for k in range(60_000))[: 2**20 - 50])
_config("a long name of many", b"x" * 400_000 + b":\n" + b"".join(b" a%d: 1\n" % k for k in range(50_000)))


@case("rollouts: odd names")
def odd_names(folder: Path) -> None:
    for name in (*("9" * count for count in (16, 30, 200)), "-1", "1e9", "²", "٣", "", "1\n", "\udcff"):
        (folder / f"rollouts/step_{name}.jsonl").write_bytes(line(ROLLOUTS))


def _columns(pieces: Any, rows: int) -> Any:
    import pyarrow

    return pyarrow.table({"row": pyarrow.array(range(rows)), "sample": pyarrow.array(range(rows)), "pieces": pieces})


def bomb(path: Path) -> None:
    """A row of many equal numbers, which takes some kilobytes."""
    import pyarrow

    count = LARGE // 4
    flat = pyarrow.array([1.0], pyarrow.float32()).take(pyarrow.array(bytes(0), pyarrow.int32()))
    flat = pyarrow.FloatArray.from_buffers(pyarrow.float32(), count, [None, pyarrow.py_buffer(bytes(4 * count))])
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, count], pyarrow.int32()), flat)
    parquet(path, _columns(lists, 1), compression="zstd", use_dictionary=False, data_page_size=LARGE * 2)


@case("parquet: a page that is larger than the footer says")
def lying(folder: Path) -> None:
    """The total size of the row group, a number of varying length, is replaced by one that is small."""
    bomb(folder / TOKENS)
    content = (folder / TOKENS).read_bytes()
    for size in range(LARGE - 2**16, LARGE + 2**16):
        if (coded := _zigzag(size)) in content[-20_000:]:
            content = content[:-20_000] + content[-20_000:].replace(
                coded, b"\xf0\x80\x80\x80\x01"[: len(coded) - 1] + b"\x00"
            )
    dense(folder / TOKENS, [content])


def _zigzag(value: int) -> bytes:
    value, coded = 2 * value, bytearray()
    while value > 127:
        coded.append(value & 127 | 128)
        value >>= 7
    return bytes([*coded, value])


@case("folder: links to parents, and odd names")
def odd_folders(folder: Path) -> None:
    for number in range(20):
        (folder.parent / f"loop_{number}").symlink_to("..")
    (folder.parent / "self").symlink_to("self")
    for name in (b"<script>alert(1)", b"line\nbreak", b"\x1b[31m", b"\xff\xfe", b"__proto__", b"\xe2\x80\xae"):
        place = os.path.join(os.fsencode(folder.parent), b"odd_" + name)
        os.mkdir(place)
        Path(os.fsdecode(place), METRICS).write_bytes(line(METRICS))


@case("report.html: a folder")
def report_folder(folder: Path) -> None:
    other_kind(folder, "report.html", "folder")
    (folder / "report.html/file").write_text("")


@case("report.html: its draft is a link to a file outside")
def report_link(folder: Path) -> None:
    outside = folder.parent.parent / "outside.txt"
    outside.write_text("mine")
    (folder / ".report.html.draft").symlink_to(outside)


@case("report.html: its draft is a pipe")
def report_pipe(folder: Path) -> None:
    other_kind(folder, ".report.html.draft", "pipe")
