"""Wrong, huge and hostile files for the folder of a run: what benchmarks/hostile_runs.py and tests/watch ask about.

`CASES` has functions by name, each of which damages a small healthy run (`write_run`) in a folder. They take `large`, a
number of bytes: about the size of files that are meant to be huge. What a function returns, if anything, is to be
called over and over while the files are read: it changes them.
"""

import itertools
import json
import os
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

MB = 10**6
SECRET = "root:x:0:0"
"""A text in the file outside of the run to which links lead; no answer may contain it."""
EVIL = "</script><script>alert(1)</script>\x00\x1b[31m\u202e\ud800__proto__"
Case = Callable[[Path, int], Callable[[], None] | None]
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


def sparse(path: Path, size: int, begin: bytes = b"", end: bytes = b"") -> None:
    """A file of zeros, which takes no room on the disk, between two lines."""
    dense(path, [begin])
    with path.open("r+b") as file:
        file.truncate(size)
        file.seek(0, os.SEEK_END)
        file.write(end)


def parquet(path: Path, rows: list[dict[str, Any]] | Any, **options: Any) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(exist_ok=True)
    table = pyarrow.Table.from_pylist(rows) if isinstance(rows, list) else rows
    pyarrow.parquet.write_table(table, path, **options)


def other_kind(folder: Path, name: str, kind: str) -> None:
    """Put a folder, a pipe or a link in the place of a file."""
    path = folder / name
    if path.is_dir():
        path.rename(path.with_name("moved"))
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    made: dict[str, Callable[[], None]] = {
        "folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "loop": lambda: path.symlink_to(path.name),
        "zeros": lambda: path.symlink_to("/dev/zero"), "outside": lambda: path.symlink_to("/etc/passwd"),
        "outside folder": lambda: path.symlink_to("/etc"), "file": lambda: path.write_bytes(b"none") and None,
        "denied": lambda: (path.write_bytes(b"{}\n"), path.chmod(0))[1],
    }  # fmt: skip
    made[kind]()


def case(name: str) -> Callable[[Case], Case]:
    return lambda function: CASES.setdefault(name, function)


def steps_of(name: str, **other: Any) -> Iterator[bytes]:
    """Good lines of ascending steps, without end."""
    before, after = line(name, **{**other, "step": "|"}).split(b'"|"', 1)
    return (before + b"%d" % step + after for step in itertools.count(10))


def any_file(name: str) -> None:
    """Cases that concern every file of lines alike."""

    @case(f"{name}: holes of zeros")
    def holes(folder: Path, large: int) -> None:
        sparse(folder / name, large, line(name), b"\n" + line(name, step=3))

    @case(f"{name}: one huge line")
    def one(folder: Path, large: int) -> None:
        rest = b'{"step": 2, "completion": "', *itertools.repeat(b"x" * MB, large // MB), b'"}\n', line(name, step=3)
        dense(folder / name, (line(name), *rest))

    @case(f"{name}: short lines")
    def short(folder: Path, large: int) -> None:
        dense(folder / name, itertools.repeat(b"{}\n" * 10**4), large // 50)

    @case(f"{name}: lines of many values")
    def values(folder: Path, large: int) -> None:
        lists = (raw(name, "extra", b"[" + b"[]," * 2_700_000 + b"0]", step) for step in range(10, 40))
        dense(folder / name, lists, large // 5)

    @case(f"{name}: lines of many keys")
    def keys(folder: Path, large: int) -> None:
        many = b"{" + b",".join(b'"%d":0' % key for key in range(700_000)) + b"}"
        dense(folder / name, (raw(name, "rewards", many, step) for step in range(10, 40)), large // 5)

    @case(f"{name}: lines of many names, short of the limits")
    def names(folder: Path, large: int) -> None:
        texts = ((b'{"step": %d' % s, *(b', "%d/%d": 0' % (s, k) for k in range(1000)), b"}\n") for s in range(10**6))
        dense(folder / name, map(b"".join, texts), large // 5)

    @case(f"{name}: lines of many letters")
    def letters(folder: Path, large: int) -> None:
        texts = ("\U0001f600\u1e9e\\u0130", 900_000), ("\\\\", 3_500_000), ('\\"', 3_500_000)
        made = [b'"' + text.encode() * count + b'"' for text, count in texts]
        fields = ("completion", "prompt", "message")
        rows = (raw(name, fields[at % 3], made[at // 3 % 3], at + 10) for at in itertools.count())
        dense(folder / name, rows, large // 5)

    @case(f"{name}: deep")
    def deep(folder: Path, large: int) -> None:
        depths = (40, 900, 10**6)
        dense(folder / name, (raw(name, "extra", b"[" * d + b"]" * d, at + 1) for at, d in enumerate(depths)))

    @case(f"{name}: odd numbers")
    def numbers(folder: Path, large: int) -> None:
        values = ("NaN", "1e999", "-1e999", "9" * 5000, "9" * 4 * MB, "1." + "3" * 4 * MB, "1e308", "-1e308", "5e-324",
                  "9007199254740993", "2147483647", "-1", "0.5", "true", "null", '"1"', "1e-999999999")  # fmt: skip
        fields = ("step", "since", "group", "sample", "reward", "prompt_id", "reward/mean", "time/step_s", "edges")
        rows = [raw(name, f, v.encode(), at + 5) for at, (v, f) in enumerate(itertools.product(values, fields))]
        dense(folder / name, [line(name), *rows])

    @case(f"{name}: scripts and control characters")
    def scripts(folder: Path, large: int) -> None:
        fields = (*LINES[name], EVIL)
        rows = [line(name, step=at + 5, **{field: EVIL}) for at, field in enumerate(fields) if field != "step"]
        dense(
            folder / name, [*rows, line(name, step=50, **{"__proto__": 1, "constructor": 2, f"reward/{EVIL}/mean": 1})]
        )

    @case(f"{name}: UTF-16 and noise")
    def encodings(folder: Path, large: int) -> None:
        noise = random.Random(0).randbytes(MB)
        dense(folder / name, [line(name).decode().encode("utf-16"), b"\xff\xfe\n", *[noise] * 20, b"\n", line(name)])

    for kind in ("folder", "pipe", "loop", "zeros", "outside", "denied"):
        CASES[f"{name}: {kind}"] = lambda folder, large, kind=kind: other_kind(folder, name, kind)  # type: ignore[misc]


for _name in LINES:
    any_file(_name)
for _kind in ("folder", "pipe", "loop", "zeros", "outside", "denied"):
    for _name in (CONFIG, TOKENS, ".lock"):
        CASES[f"{_name}: {_kind}"] = lambda folder, large, n=_name, k=_kind: other_kind(folder, n, k)  # type: ignore[misc]
for _kind in ("loop", "outside folder", "file"):
    CASES[f"rollouts: {_kind}"] = lambda folder, large, k=_kind: other_kind(folder, "rollouts", k)  # type: ignore[misc]


@case("metrics: many good steps of few values")
def few_values(folder: Path, large: int) -> None:
    dense(folder / METRICS, (b'{"step": %d}\n' % step for step in itertools.count()), large // 10)


@case("metrics: many good steps of 1900 values")
def wide_rows(folder: Path, large: int) -> None:
    dense(folder / METRICS, steps_of(METRICS, **{f"source/{k}": 0.25 for k in range(1900)}), large // 5)


@case("metrics: every step is damaged")
def damaged(folder: Path, large: int) -> None:
    dense(folder / METRICS, itertools.chain([line(METRICS, step=10**9)], steps_of(METRICS)), large // 2)


@case("details: millions of prompts")
def many_prompts(folder: Path, large: int) -> None:
    rows = (
        raw(TRACES, "prompts", b"[" + b",".join(b"[%d,0.5,0]" % (k + 5000 * step) for k in range(5000)) + b"]", step)
        for step in itertools.count()
    )
    dense(folder / TRACES, rows, large // 10)


@case("details: few prompts and many steps")
def many_entries(folder: Path, large: int) -> None:
    lists = [[prompt, 0.5, 0] for prompt in range(5000)]
    dense(folder / TRACES, steps_of(TRACES, prompts=lists, histograms={}), large // 10)


@case("details: large histograms")
def large_histograms(folder: Path, large: int) -> None:
    one = {"edges": list(range(513)), "counts": [1] * 512}
    dense(folder / TRACES, steps_of(TRACES, prompts=[], histograms={f"h{k}": one for k in range(32)}), large // 10)


@case("details: steps far apart and out of order")
def far_steps(folder: Path, large: int) -> None:
    steps = (0, 999_999_999, 5, 2**31 - 1, 7, 3)
    dense(folder / TRACES, [line(TRACES, step=step) * 20_000 for step in steps])


@case("alarms: a million good ones")
def many_alarms(folder: Path, large: int) -> None:
    dense(folder / ALARMS, steps_of(ALARMS, message="x" * 500), large // 3)


def _config(name: str, content: Callable[[int], bytes]) -> None:
    CASES[f"config: {name}"] = lambda folder, large: dense(folder / CONFIG, [content(large)])


_TAGS = b"".join(b"%%TAG !%d! a\n" % number for number in range(50_000))
_config("30 MB", lambda large: b"a: {b: 1}\n" * (min(large, 30 * MB) // 10))
_config("just short of 1 MiB", lambda large: b"".join(b"a%d: {b: [1]}\n" % k for k in range(60_000))[: 2**20 - 50])
_config("aliases of aliases", lambda large: b"a0: &a0 [x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (k, k, b",".join([b"*a%d" % (k - 1)] * 10)) for k in range(1, 12)))  # fmt: skip
_config("merges of merges", lambda large: b"a0: &a0 {x: 1}\n" + b"".join(
    b"a%d: &a%d {<<: [%s]}\n" % (k, k, b",".join([b"*a%d" % (k - 1)] * 10)) for k in range(1, 12)))  # fmt: skip
_config("aliases of a long text", lambda large: b"a: &a " + b"x" * 500_000 + b"\nb: [" + b"*a," * 100_000 + b"]")
_config("many anchors", lambda large: b"".join(b"- &a%d x\n" % number for number in range(70_000)))
_config("many tags", lambda large: _TAGS + b"---\na: 1\n")
_config("flow levels", lambda large: b"[" * 900_000)
_config("block levels", lambda large: b"- " * 500_000)
_config("complex keys", lambda large: b"? " * 500_000 + b"[? a : b, " * 1000)
_config(
    "a long name of many", lambda large: b"x" * 400_000 + b":\n" + b"".join(b" a%d: 1\n" % k for k in range(50_000))
)
_config("odd values", lambda large: b"{2020-01-01: {[1]: 2}, run: {steps: .inf, 1: " + b"9" * 5000 + b"}, a: 1:2:3:4}")
_config(
    "scripts", lambda large: EVIL.replace("\x00", "").encode(errors="replace") + b": '<img src=x onerror=alert(1)>'"
)
_config("UTF-16", lambda large: "run: {steps: 3}".encode("utf-16"))
_config("every byte", lambda large: bytes(range(256)) * 100)
_config("holes of zeros", lambda large: b"run: {steps: 3}\n" + bytes(2 * MB))


@case("config: holes of 1 GB")
def config_holes(folder: Path, large: int) -> None:
    sparse(folder / CONFIG, large, b"run: {steps: 3}\n", b"\na: 1\n")


@case("rollouts: 10,000 files")
def many_files(folder: Path, large: int) -> None:
    for step in range(10**4):
        (folder / f"rollouts/step_{step:06d}.jsonl").write_bytes(line(ROLLOUTS) if step % 100 == 0 else b"")


@case("rollouts: 300,000 empty files")
def very_many_files(folder: Path, large: int) -> None:
    for step in range(min(300_000, large // 3000)):
        os.close(os.open(folder / f"rollouts/step_{step:06d}.jsonl", os.O_CREAT | os.O_WRONLY))


@case("rollouts: odd names")
def odd_names(folder: Path, large: int) -> None:
    for name in (*("9" * count for count in (16, 30, 200)), "-1", "1e9", "²", "٣", "", "1\n", "\udcff"):
        (folder / f"rollouts/step_{name}.jsonl").write_bytes(line(ROLLOUTS))


@case("rollouts: all in one group, without reason")
def one_group(folder: Path, large: int) -> None:
    dense(
        folder / ROLLOUTS, (line(ROLLOUTS, sample=k, reward=k, extra=[{}] * 200) for k in itertools.count()), large // 5
    )


@case("parquet: garbage with a footer of 2 GB")
def garbage(folder: Path, large: int) -> None:
    dense(folder / TOKENS, [b"PAR1", random.Random(0).randbytes(MB), struct.pack("<I", 2**31 - 1), b"PAR1"])


@case("parquet: holes of zeros")
def parquet_holes(folder: Path, large: int) -> None:
    sparse(folder / TOKENS, large, b"PAR1", struct.pack("<I", large - 12) + b"PAR1")


@case("parquet: cut short")
def short_parquet(folder: Path, large: int) -> None:
    content = (folder / TOKENS).read_bytes()
    dense(folder / TOKENS, [content[: len(content) // 2], content[-len(content) // 3 :]])


def _columns(pieces: Any, rows: int) -> Any:
    import pyarrow

    return pyarrow.table({"row": pyarrow.array(range(rows)), "sample": pyarrow.array(range(rows)), "pieces": pieces})


@case("parquet: one text for many rows")
def dictionary_bomb(folder: Path, large: int) -> None:
    import pyarrow

    places = pyarrow.array([0] * 100_000, pyarrow.int32())
    texts = pyarrow.DictionaryArray.from_arrays(places, ["x" * MB])
    lists = pyarrow.ListArray.from_arrays(pyarrow.array(range(100_001), pyarrow.int32()), texts)
    parquet(folder / TOKENS, _columns(lists, 100_000), compression="none")


def bomb(path: Path, large: int) -> None:
    """A row of many equal numbers, which takes some kilobytes."""
    import pyarrow

    count = large // 4
    flat = pyarrow.array([1.0], pyarrow.float32()).take(pyarrow.array(bytes(0), pyarrow.int32()))
    flat = pyarrow.FloatArray.from_buffers(pyarrow.float32(), count, [None, pyarrow.py_buffer(bytes(4 * count))])
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, count], pyarrow.int32()), flat)
    parquet(path, _columns(lists, 1), compression="zstd", use_dictionary=False, data_page_size=large * 2)


@case("parquet: a row of huge size in a page of zstd")
def zip_bomb(folder: Path, large: int) -> None:
    bomb(folder / TOKENS, large)


@case("parquet: a page that is larger than the footer says")
def lying(folder: Path, large: int) -> None:
    """The total size of the row group, a number of varying length, is replaced by one that is small."""
    bomb(folder / TOKENS, large)
    content = (folder / TOKENS).read_bytes()
    for size in range(large - 2**16, large + 2**16):
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


@case("parquet: many row groups")
def many_groups(folder: Path, large: int) -> None:
    import pyarrow

    count = min(30_000, large // 10_000)
    parquet(folder / TOKENS, _columns(pyarrow.array([["a"]] * count), count), row_group_size=1)


@case("parquet: many columns")
def many_columns(folder: Path, large: int) -> None:
    import pyarrow

    names = [f"c{k}" for k in range(min(20_000, large // 10_000))]
    parquet(folder / TOKENS, pyarrow.table({"row": [0], **{name: [1] for name in names}}))


@case("parquet: wrong types")
def wrong_types(folder: Path, large: int) -> None:
    parquet(folder / TOKENS, [{"row": "a", "sample": b"\xff", "pieces": [1, None], "given": "x"}])
    parquet(folder / REPLAY, [{"row": k, "token_ids": {"a": [k]}, "kl": 3} for k in range(20)])


@case("parquet: a replay that is a bomb")
def replay_bomb(folder: Path, large: int) -> None:
    bomb(folder / REPLAY, large)


@case("all files: shrinking and changing while they are read")
def changing(folder: Path, large: int) -> Callable[[], None]:
    chance = random.Random(0)
    for name in LINES:
        dense(folder / name, steps_of(name), large // 50)

    def change() -> None:
        path = folder / chance.choice([*LINES, TOKENS, CONFIG])
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(chance.randrange(size + 1) if size > 10**5 else size + 10**6)
            file.seek(chance.randrange(size + 1))
            file.write(chance.randbytes(300))

    return change


@case("all files: growing while they are read")
def growing(folder: Path, large: int) -> Callable[[], None]:
    lines = {name: steps_of(name) for name in LINES}

    def grow() -> None:
        for name, made in lines.items():
            with (folder / name).open("ab") as file:
                file.write(b"".join(itertools.islice(made, 300)))

    return grow


@case("lock: holes of zeros")
def lock_holes(folder: Path, large: int) -> None:
    sparse(folder / ".lock", large)


@case("folder: 3,000 runs")
def many_runs(folder: Path, large: int) -> None:
    for number in range(min(3000, large // 10**5)):
        place = folder.parent / f"many_{number}"
        dense(place / METRICS, [line(METRICS)])
        (place / CONFIG).write_text("run: {steps: 100}\n")


@case("folder: 2,000 runs that are slow to read")
def slow_runs(folder: Path, large: int) -> None:
    keys = b"{" + b",".join(b'"%d":0' % key for key in range(90_000)) + b"}"
    content = raw(METRICS, "extra", keys)
    config = b"".join(b"a%d: {b: [1]}\n" % key for key in range(4000))
    for number in range(min(2000, large // 10**6)):
        place = folder.parent / f"slow_{number}"
        dense(place / METRICS, [content])
        dense(place / CONFIG, [config])


@case("folder: links to parents, and odd names")
def odd_folders(folder: Path, large: int) -> None:
    for number in range(20):
        (folder.parent / f"loop_{number}").symlink_to("..")
    (folder.parent / "self").symlink_to("self")
    for name in (b"<script>alert(1)", b"line\nbreak", b"\x1b[31m", b"\xff\xfe", b"__proto__", b"\xe2\x80\xae"):
        place = os.path.join(os.fsencode(folder.parent), b"odd_" + name)
        os.mkdir(place)
        Path(os.fsdecode(place), METRICS).write_bytes(line(METRICS))


@case("folder: 300,000 files beside the runs")
def beside(folder: Path, large: int) -> None:
    place = folder.parent / "beside"
    place.mkdir()
    for number in range(min(300_000, large // 3000)):
        os.close(os.open(place / f"{number}.txt", os.O_CREAT | os.O_WRONLY))


@case("folder: 100,000 folders beside the runs")
def beside_folders(folder: Path, large: int) -> None:
    for number in range(min(100_000, large // 10**4)):
        os.makedirs(folder.parent / f"beside/{number // 100}/{number}")


@case("report.html: a folder")
def report_folder(folder: Path, large: int) -> None:
    other_kind(folder, "report.html", "folder")
    (folder / "report.html/file").write_text("")


@case("report.html: its draft is a link to a file outside")
def report_link(folder: Path, large: int) -> None:
    outside = folder.parent.parent / "outside.txt"
    outside.write_text("mine")
    (folder / ".report.html.draft").symlink_to(outside)


@case("report.html: its draft is a pipe")
def report_pipe(folder: Path, large: int) -> None:
    other_kind(folder, ".report.html.draft", "pipe")
