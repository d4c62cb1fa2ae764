"""Try what strangers bring: other people's rows, tokens, rewards, names and commands.

    python benchmarks/field.py                     every case of tests/field/, and variations of rows and tokens
    python benchmarks/field.py rows tokens/eos     only these sections or cases, without the variations
    python benchmarks/field.py --json [FILE]       counts into a file, by default benchmarks/results/field.json

A case is a folder `tests/field/SECTION/NAME/` with input files and a `case.yaml`; tests/field/test_field.py runs each.
Everything happens in a copy of the folder. A case says

    from          the public report that the input resembles
    model         the tiny model that is made for it, by its name in field_models.py; default: chatml

and what is tried, which is one of

    command       a list of arguments of hybrid-grpo, run in this process; `{model}` stands for the folder of the model,
                  and `{model:bos}` for that of another. With `process: true`, it is run in a process of its own: give
                  this where the command starts training or leaves anything behind. `stdin` is a text.
    prompts       settings of `data.*`: prompts are read as `train` and `generate` read them
    pairs         settings of `data.*`: prompts and completions are read as `sft` reads them

and what is right, which is one of

    refused       a regular expression; the command ends with status 2 and one line on standard error that contains it
    text          the prompts as the model reads them: a list of texts with special tokens
    completions   beside `text`, for pairs: the target texts with special tokens
    equals        settings of `data.*` whose prompts, columns and completions are the same
    columns       beside any of these: some columns of the first row, as rewards receive them
    status        the exit status of a command, 0 by default, with lists of regular expressions that its standard
                  output (`stdout`) and standard error (`stderr`) contain, and `not`, which neither contains
"""

import argparse
import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import forks
import yaml
from field_models import load_tokenizer, model_folder
from field_tokens import token_variations
from field_variations import variations
from machine import save
from paths import ROOT

from hybrid_grpo.__main__ import main as hybrid_grpo
from hybrid_grpo.config.errors import UserError

CASES = ROOT / "tests" / "field"
RESULTS = Path(__file__).parent / "results" / "field.json"
_MODEL = re.compile(r"\{model(?::(\w+))?\}")
_WAYS, _RIGHT = ("command", "prompts", "pairs"), ("refused", "text", "equals", "status", "stdout", "stderr")
Case = dict[str, Any]


def names() -> list[str]:
    """The cases, as SECTION/NAME."""
    return sorted(str(path.parent.relative_to(CASES)) for path in CASES.rglob("case.yaml"))


def load(name: str) -> Case:
    case: Case = yaml.safe_load((CASES / name / "case.yaml").read_text(encoding="utf-8"))
    known = {"from", "model", "process", "stdin", "completions", "columns", "not", *_WAYS, *_RIGHT}
    assert set(case) <= known, f"{name}: unknown keys {set(case) - known}"
    assert "from" in case and sum(way in case for way in _WAYS) == 1 and set(case) & {*_RIGHT, "completions"}, name
    return case


def wrong(case: Case, folder: Path) -> str:
    """Try a case in a copy of its folder; return what is wrong, or nothing."""
    with tempfile.TemporaryDirectory() as place:
        work = Path(place) / "work"
        shutil.copytree(folder, work, ignore=shutil.ignore_patterns("case.yaml"))
        with contextlib.chdir(work):
            return _wrong_command(case) if "command" in case else _wrong_rows(case)


def _wrong_command(case: Case) -> str:
    model = case.get("model", "chatml")
    arguments = [_MODEL.sub(lambda m: str(model_folder(m[1] or model)), str(word)) for word in case["command"]]
    if case.get("process"):
        done = forks.run("-m", "hybrid_grpo", *arguments, cwd=Path.cwd())
        status, out, err = done.status, done.out, done.err
    else:
        status, out, err = run_here(arguments, case.get("stdin", ""))
    if "refused" in case:
        return _wrong_refusal(status, err, case["refused"])
    if status != case.get("status", 0):
        return f"status {status}: {err[-2000:]}"
    for name, text in (("stdout", out), ("stderr", err)):
        for pattern in case.get(name, ()):
            if not re.search(pattern, text, re.M):
                return f"{name} has no {pattern!r}: {text[-2000:]!r}"
    found = [pattern for pattern in case.get("not", ()) if re.search(pattern, out + err, re.M)]
    return f"the output has {found}: {(out + err)[-2000:]!r}" if found else ""


def run_here(arguments: list[str], stdin: str = "") -> tuple[int, str, str]:
    """Run hybrid-grpo in this process; return its status and its two outputs."""
    given, out, err = (io.TextIOWrapper(io.BytesIO(text.encode()), write_through=True) for text in (stdin, "", ""))
    captured = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with captured[0], captured[1], mock.patch.object(sys, "stdin", given), mock.patch.dict(os.environ):
        try:
            status = hybrid_grpo(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
        except Exception:
            traceback.print_exc()
            status = 1
    return status, *(stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]


def _wrong_refusal(status: int, err: str, pattern: str) -> str:
    lines = [line for line in err.strip().splitlines() if "another process is compiling" not in line]
    if status != 2 or len(lines) != 1 or not lines[0].startswith("hybrid-grpo"):
        return f"not refused in one line, status {status}: {err[-2000:]}"
    return "" if re.search(pattern, lines[0]) else f"refused, but without {pattern!r}: {lines[0]}"


def _wrong_rows(case: Case) -> str:
    way = next(way for way in _WAYS if way in case)
    model = case.get("model", "chatml")
    try:
        found = read_texts(case[way], model, pairs=way == "pairs")
    except UserError as error:
        line = f"hybrid-grpo: error: {' '.join(str(error).split())}"
        return _wrong_refusal(2, line, case["refused"]) if "refused" in case else line
    except Exception:
        return traceback.format_exc()
    if "refused" in case:
        return f"not refused: {found}"
    if "equals" in case and found != (right := read_texts(case["equals"], model, pairs=way == "pairs")):
        return f"{found}\n is not {right}"
    for name in ("text", "completions"):
        if name in case and [row[name] for row in found] != case[name]:
            return f"{name}: {[row[name] for row in found]}\n is not {case[name]}"
    seen = found[0]["columns"]
    absent = {name: right for name, right in case.get("columns", {}).items() if name not in seen or seen[name] != right}
    return f"columns {seen} have not {absent}" if absent else ""


def read_texts(settings: Case, model: str, *, pairs: bool) -> list[dict[str, Any]]:
    """The text, columns and, for pairs, completions of every row, decoded from the tokens that the model reads."""
    from hybrid_grpo.commands.configs import GenerateConfig
    from hybrid_grpo.commands.pairs import read_pairs
    from hybrid_grpo.config import DataConfig, build
    from hybrid_grpo.config.checks import check_data
    from hybrid_grpo.data.prompts import read_prompts

    tokenizer = load_tokenizer(model)
    data: DataConfig = build(GenerateConfig, {"policy": {"model": "x"}, "data": settings}).data
    check_data(data)
    if not pairs:
        prompts = read_prompts(data, tokenizer)[0]
        return [{"text": tokenizer.decode(p.token_ids), "columns": p.columns} for p in prompts]
    read = read_pairs(data, tokenizer, 1 << 20, ends=[tokenizer.eos_token_id])[0]
    return [
        {
            "text": tokenizer.decode(pair.prompt.token_ids),
            "columns": pair.prompt.columns,
            "completions": tokenizer.decode(pair.completion_ids),
        }
        for pair in read
    ]


def results(chosen: list[str]) -> Iterator[tuple[str, str]]:
    """The name of each case, and what is wrong with it."""
    for name in names():
        if not chosen or any(name == one or name.startswith(f"{one.rstrip('/')}/") for one in chosen):
            yield name, wrong(load(name), CASES / name)


def varied() -> Iterator[tuple[str, str]]:
    """The same for the variations of rows and of special tokens."""

    def read(path: Any, model: str) -> list[str] | str:
        try:
            found = read_texts({"path": path}, model, pairs=True)
        except UserError as error:
            return str(error)
        except Exception:
            return traceback.format_exc()
        return [row["text"] + row["completions"] for row in found]

    with tempfile.TemporaryDirectory() as folder:
        yield from ((f"variations/{name}", why) for name, why in variations(Path(folder), read))
        yield from ((f"token_variations/{name}", why) for name, why in token_variations(Path(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", help="sections or cases, by default all")
    parser.add_argument("--json", nargs="?", const=RESULTS, type=Path, metavar="FILE", help="write counts into a file")
    options = parser.parse_args()
    begin, found = time.monotonic(), Counter[str]()
    failures: dict[str, str] = {}
    for name, why in chain(results(options.cases), () if options.cases else varied()):
        found[name.partition("/")[0]] += 1
        if why:
            failures[name] = " ".join(why.split())[:300]
            print(f"WRONG {name}: {why}")
    seconds = time.monotonic() - begin
    print(f"{sum(found.values())} cases, {len(failures)} wrong, {seconds:.0f} s: {dict(found)}")
    save(options.json, {"cases": found, "wrong": failures})
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
