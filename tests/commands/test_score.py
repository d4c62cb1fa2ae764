"""`score`, in this process, on rows of letters."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from char_tokenizer import char_tokenizer

from hybrid_grpo.__main__ import main
from hybrid_grpo.config import DataConfig, ScoreConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.data.completed import read_completed

pytestmark = pytest.mark.process
REWARDS = """
import time

def picky(completions, answer):
    (text,), (answer,) = completions, answer
    if text == "boom":
        raise ValueError("no luck")
    time.sleep(2.0 if text == "slow" else 0.0)
    return [None if text == "skip" else float(text == answer)]

def longest(completions):
    return [float(len(text) == max(map(len, completions))) for text in completions]
longest.batch_size = "group"

def chatty(prompts, completions, log_extra):
    log_extra("role", [prompt[-1]["role"] for prompt in prompts])
    return [len(completion[-1]["content"]) for completion in completions]

def tokens(completion_ids):
    return [float(len(ids)) for ids in completion_ids]

def broken(completions):
    raise RuntimeError("always")

def never(completions):
    return [None] * len(completions)
"""
ROWS: list[dict[str, Any]] = [
    {"prompt": "ba=", "answer": "ab", "completions": ["ab", "ba", "boom"]},
    {"prompt": "cb=", "answer": "bc", "completion": "skip"},
    {"prompt": "dcb=", "columns": {"answer": "bcd"}, "completion": "bcd"},
]


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(REWARDS)
    write("rows.jsonl", ROWS)
    return tmp_path


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def rewards(*names: str, **settings: Any) -> list[str]:
    entries = [{"function": f"mine.py:{name}" if ":" not in name else name[1:], **settings} for name in names]
    return ["--rewards", json.dumps(entries)]


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def summary(err: str) -> dict[str, list[str]]:
    """The numbers of the table, by label."""
    return {label: numbers for label, *numbers in (re.split(r"\s{2,}", row.strip()) for row in err.splitlines())}


def test_every_completion_has_a_line_and_every_function_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "rows.jsonl", *rewards("picky", "longest", ":exact_match")]) == 0
    out, err = capsys.readouterr()
    rows = lines(out)
    assert [(row["id"], row["sample"]) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)]
    assert [row["rewards"]["picky"] for row in rows] == [1.0, 0.0, None, None, 1.0]
    assert [row["rewards"]["longest"] for row in rows] == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert [row["reward"] for row in rows] == [2.0, 0.0, None, 1.0, 3.0]
    assert list(rows[2]["failed"]) == ["picky"] and "raised ValueError: no luck" in rows[2]["failed"]["picky"]
    assert all(row["failed"] == {} for row in rows if row is not rows[2])
    table = summary(err)
    assert table["scored"] == ["3", "5", "5"]
    assert table["does not apply"] == ["1", "0", "0"] and table["failed"] == ["1", "0", "0"]
    assert table["mean"] == ["0.667", "0.600", "0.400"]
    assert table["standard deviation"] == ["0.577", "0.548", "0.548"]
    assert table["share of 0"] == ["0.333", "0.400", "0.600"] and table["share of 1"] == ["0.667", "0.600", "0.400"]
    assert table["calls"][:2] == ["5", "3"]
    assert "picky: first failure at row 0, sample 2: raised ValueError: no luck (mine.py:7)" in err


def test_the_slowest_call_and_calls_out_of_time_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    write("slow.jsonl", [{"prompt": "", "answer": "", "completions": ["slow", "fast"]}])
    assert main(["score", "slow.jsonl", *rewards("picky")]) == 0
    table = summary(capsys.readouterr().err)
    assert 2.0 <= float(table["slowest call, s"][0]) < 20 and float(table["calls a second"][0]) < 1.1
    assert main(["score", "slow.jsonl", *rewards("picky", timeout_s=1.0)]) == 0
    out, err = capsys.readouterr()
    assert [row["rewards"]["picky"] for row in lines(out)] == [None, 0.0]
    assert summary(err)["out of time"] == ["1"]


def test_a_pipe_and_a_file(there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What `generate` writes is read; names of columns are settings."""
    given = '{"id": 0, "q": "ba=", "completion": "ab", "columns": {"answer": "ab"}}\n\n{"q": "", "completion": "c"}\n'
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(given.encode())))
    assert main(["score", "-", *rewards("longest"), "--data.prompt_column=q", "--score.output=out.jsonl"]) == 0
    assert capsys.readouterr().out == ""
    assert [row["reward"] for row in lines((there / "out.jsonl").read_text())] == [1.0, 1.0]


def test_chats(capsys: pytest.CaptureFixture[str]) -> None:
    answer = [{"role": "assistant", "content": "four"}]
    write("chat.jsonl", [{"prompt": [{"role": "user", "content": "?"}], "text": answer}])
    assert main(["score", "chat.jsonl", *rewards("chatty"), "--data.completion_column=text"]) == 0
    (row,) = lines(capsys.readouterr().out)
    assert row["reward"] == 4.0 and row["extra"] == {"chatty/role": "user"}


def test_a_recipe_s_source_and_system_message_are_not_those_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    chat = [{"role": "system", "content": "Sort."}, {"role": "user", "content": "ba="}]
    write("said.jsonl", [{"prompt": chat, "completion": "b", "columns": {"answer": "B", "choices": None}}] * 3)
    recipe = ["--data.task", "multiple_choice", "--data.system_prompt", "Sort."]
    assert main(["score", "said.jsonl", *recipe, "--data.subset", "ARC-Easy"]) == 0
    assert [row["reward"] for row in lines(capsys.readouterr().out)] == [0.0] * 3
    assert parse(ScoreConfig, ["--data.task", "letters"], "score").config.data.limit is None


def test_tokens_come_from_the_tokenizer_of_the_model(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    char_tokenizer().save_pretrained(there / "model")
    assert main(["score", "rows.jsonl", *rewards("tokens"), "--policy.model=model"]) == 0
    assert [row["reward"] for row in lines(capsys.readouterr().out)] == [2.0, 2.0, 4.0, 4.0, 3.0]


@pytest.mark.parametrize("options, says", [
    ([], "usage: hybrid-grpo score FILE"),
    (["rows.jsonl"], "rewards is empty: give at least one"),
    (["no.jsonl", *rewards("longest")], "FILE no.jsonl: there is no such file or folder"),
    (["rows.jsonl", *rewards("longst")], "did you mean longest?"),
    (["rows.jsonl", *rewards("longest"), "--score.output=rows.jsonl"], "would replace the completions that are scored"),
    (["rows.jsonl", *rewards("longest"), "--data.prompt_column=q"], "data.prompt_column q: row 0 (from 0) of rows"),
    (["rows.jsonl", *rewards("longest"), "--data.completion_column=text"], "has neither text nor texts"),
    (["rows.jsonl", *rewards("tokens")], "tokens looks at completion_ids, which are made of the texts by"),
    (["mine.jsonl", *rewards("longest")], "FILE mine.jsonl line 2 is not JSON"),
])  # fmt: skip
def test_mistakes(capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    Path("mine.jsonl").write_text('{"prompt": "", "completion": ""}\n{"prompt": \n')
    assert main(["score", *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hybrid-grpo: error: ") and said.count("\n") == 1
    assert says in said


@pytest.mark.parametrize("name", ["broken", "never"])
def test_where_nothing_could_be_scored_the_status_says_so(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["score", "rows.jsonl", *rewards(name)]) == 2
    out, err = capsys.readouterr()
    assert [row["rewards"][name] for row in lines(out)] == [None] * 5
    assert "hybrid-grpo: error: rewards: nothing could be scored" in err.splitlines()[-1]


@pytest.mark.parametrize("value", [3, [], [[]], ["a", 3], [{"role": "user", "content": "?"}]])
def test_what_is_no_completion_is_named_by_its_row(there: Path, value: Any) -> None:
    write("odd.jsonl", [{"prompt": "", "completion": "a"}, {"prompt": "", "completion": value}])
    with pytest.raises(UserError, match=r"completion: row 1 \(from 0\) of odd.jsonl has .*: give text, or a chat"):
        read_completed("odd.jsonl", DataConfig(), [])
