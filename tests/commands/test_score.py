"""`score`, in this process: on rows of letters, and on a tiny run whose own rewards must say again what they said."""

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import yaml
from char_tokenizer import char_tokenizer
from launching import make_task
from refusals import refused

from hybrid_grpo.__main__ import main
from hybrid_grpo.commands.configs import ScoreConfig
from hybrid_grpo.config.parsing import parse

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


@pytest.fixture
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


def test_every_completion_has_a_line_and_every_function_a_column(
    there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_the_slowest_call_and_calls_out_of_time_are_told(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_terminal_shows_20_lines_and_a_file_all(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's 2,560 completions had passed by, and the table with them."""
    write("many.jsonl", [{"prompt": "", "completion": "ab", "answer": "ab"}] * 23)
    command = ["score", "many.jsonl", *rewards(":exact_match")]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert [row["id"] for row in lines(out)] == list(range(20))
    assert "3 more lines are not shown: set score.output, or use a pipe" in err and summary(err)["scored"] == ["23"]
    assert main([*command, "--score.output=all.jsonl"]) == 0
    assert len(lines((there / "all.jsonl").read_text())) == 23 and "not shown" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert main(command) == 0
    assert len(lines(capsys.readouterr().out)) == 23


def test_chats(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = [{"role": "assistant", "content": "four"}]
    write("chat.jsonl", [{"prompt": [{"role": "user", "content": "?"}], "text": answer}])
    assert main(["score", "chat.jsonl", *rewards("chatty"), "--data.completion_column=text"]) == 0
    (row,) = lines(capsys.readouterr().out)
    assert row["reward"] == 4.0 and row["extra"] == {"chatty/role": "user"}


def test_a_conversation_is_scored_as_in_the_run_that_had_it(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a line of `rollouts/` or `generate`, only the last turn had reached the functions: they gave other rewards
    than in the run, without a warning. A column `messages` that is not the completion's stays a column."""
    asked = {"role": "user", "content": "?"}
    turns = [{"role": "assistant", "content": "a"}, asked, {"role": "assistant", "content": "bcd"}]
    (there / "turns.py").write_text(
        "def turns(completions, **columns):\n"
        "    return [10 * len(completion) + ('messages' in columns) for completion in completions]\n"
    )
    rows: list[dict[str, Any]] = [
        {"completion": "bcd", "messages": turns},
        {"completion": turns},
        {"completions": [turns, turns[2:], "bcd"]},
        {"completion": "bcd", "messages": [asked, *turns]},
    ]
    for row, rewards_B in zip(rows, ([30], [30], [30, 10, 10], [11]), strict=True):
        write("talk.jsonl", [{"prompt": [asked], **row}])
        assert main(["score", "talk.jsonl", "--rewards", "turns.py:turns"]) == 0
        assert [line["reward"] for line in lines(capsys.readouterr().out)] == rewards_B


def test_a_recipe_s_source_and_system_message_are_not_those_of_the_file(
    there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    (["rows.jsonl", *rewards("longst")], "did you mean longest?"),
    (["rows.jsonl", *rewards("longest"), "--data.prompt_column=q"], "data.prompt_column q: row 0 (from 0) of rows"),
    (["rows.jsonl", *rewards("longest"), "--data.completion_column=text"], "has neither text nor texts"),
    (["rows.jsonl", *rewards("tokens")], "tokens looks at completion_ids, which are made from the texts by"),
    (["mine.jsonl", *rewards("longest")], "SOURCE mine.jsonl line 2 is not JSON"),
])  # fmt: skip
def test_mistakes(there: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    Path("mine.jsonl").write_text('{"prompt": "", "completion": ""}\n{"prompt": \n')
    assert_refused(options, says, capsys)


def assert_refused(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hybrid-grpo: error: ") and said.count("\n") == 1
    assert says in said


@pytest.mark.parametrize("name", ["broken", "never"])
def test_where_nothing_could_be_scored_the_status_says_so(
    there: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["score", "rows.jsonl", *rewards(name)]) == 2
    out, err = capsys.readouterr()
    assert [row["rewards"][name] for row in lines(out)] == [None] * 5
    assert "hybrid-grpo: error: rewards: nothing could be scored" in err.splitlines()[-1]


# A run ----------------------------------------------------------------------------------------------------------------

RUN_REWARDS = """
def early(completions, **columns):
    if len(completions[0]) == 4:
        raise ValueError("four")
    return [None if not text else sum("a" <= letter <= "m" for letter in text) / len(text) for text in completions]

def late(completions, log_extra):
    log_extra("letters", [len(text) for text in completions])
    return [1 - sum("a" <= letter <= "m" for letter in text) / max(len(text), 1) for text in completions]

def by_letter(completions):
    return [[(c, ("a" <= c <= "m") / len(text)) for c in text] for text in completions]

def needs(completions, topic):
    return [0.0]

def plays(completions, environments):
    return [0.0]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_task(tmp_path_factory.mktemp("score"))
    (folder / "mine.py").write_text(RUN_REWARDS)
    recipe = {
        "run": {"name": "run", "steps": 3}, "policy": {"model": "model", "dtype": "float32", "lr": 1e-3},
        "engine": {"zero_stage": 0}, "log": {"wandb": "disabled"}, "data": {"path": "train.jsonl"},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_tokens": 8},
        "grpo": {"overlong_buffer": 3, "scale_rewards": "batch"},
        "rewards": [
            {"function": "mine.py:early"},
            {"function": "repetition_penalty", "weight": 0.25, "kwargs": {"ngram": 1}},
        ],
        "eval": {"threshold": 0.5},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = forks.run("-m", "hybrid_grpo", "train", "--config", "recipe.yaml", cwd=folder)
    assert done.status == 0, done.err
    return folder


@pytest.fixture
def run_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(folder)
    yield folder


def test_the_runs_own_rewards_say_again_what_they_said(run_there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the run's tokens: the repetition penalty is made of them."""
    run = run_there / "runs" / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["score", "runs/run"]) == 0
    out, err = capsys.readouterr()
    rows = lines(out)
    assert [row["step"] for row in rows] == [1] * 16 + [2] * 16 + [3] * 16
    assert all({"reward": row["reward"], "rewards": row["rewards"]} == row["before"] for row in rows)
    assert any(row["failed"] for row in rows)
    table = summary(err)
    assert "did not call" not in err, "both sums are of the same rewards"
    assert table["share that agrees"] == ["1.000"] * 3 and table["right before only"] == table["right now only"]
    assert table["mean now"] == table["mean before"] and table["correlation"] == ["1.000"] * 3
    assert int(table["compared"][0]) + int(table["failed"][0]) + int(table["does not apply"][0]) == 48
    assert re.search(r"early: first failure at step \d, row \d, sample \d: raised ValueError: four", err)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_other_rewards_for_some_steps(run_there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rewards", "[{function: 'mine.py:late'}]", "--score.steps=2-", "--score.output=mine.jsonl"]
    assert main(["score", "runs/run", *options]) == 0
    rows = lines(Path("mine.jsonl").read_text())
    saved = [row for step in (2, 3) for row in lines(Path(f"runs/run/rollouts/step_{step:06d}.jsonl").read_text())]
    assert [row["before"]["reward"] for row in rows] == [row["reward"] for row in saved]
    assert [row["extra"] for row in rows] == [{"late/letters": len(row["completion"])} for row in saved]
    both = [row for row in rows if row["before"]["reward"] is not None]
    err = capsys.readouterr().err
    table = summary(err)
    assert "also has early, repetition_penalty, which this command did not call" in err
    # The run has no function of this name: its weighted sum is what is compared with.
    assert table["compared"] == [str(len(both))] * 2 and 0 < len(both) < 32
    for label, values in (
        ("right before only", [row["before"]["reward"] >= 0.5 > row["reward"] for row in both]),
        ("right now only", [row["reward"] >= 0.5 > row["before"]["reward"] for row in both]),
    ):
        assert table[label] == [str(sum(values))] * 2
    agree = [(row["reward"] >= 0.5) == (row["before"]["reward"] >= 0.5) for row in both]
    assert table["share that agrees"] == [f"{sum(agree) / len(agree):.3f}"] * 2
    assert float(table["correlation"][0]) < 0


def test_what_an_environment_gave_is_named_where_sums_are_compared(
    run_there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weighted sum of the run, with its environment's reward, had been compared to one that cannot have it."""
    (run_there / "played" / "rollouts").mkdir(parents=True)
    shutil.copy("runs/run/config.yaml", "played")
    rows = lines(Path("runs/run/rollouts/step_000001.jsonl").read_text())
    write("played/rollouts/step_000001.jsonl", [{**row, "rewards": {**row["rewards"], "Game": 1.0}} for row in rows])
    assert main(["score", "played"]) == 0
    assert "the run's weighted sum also has Game, which this command did not call\n" in capsys.readouterr().err


def test_rewards_of_steps_add_up_to_those_of_the_run(run_there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "runs/run", "--rewards", "[{function: 'mine.py:by_letter'}]"]) == 0
    for row in lines(capsys.readouterr().out):
        early = row["before"]["rewards"]["early"]
        assert early is None or row["rewards"]["by_letter"] == pytest.approx(early)


@pytest.mark.parametrize("options, says", refused("score"))
def test_mistakes_with_a_run(
    run_there: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    for name in ("torn", "lacking", "foreign", "mistyped", "texts", "empty"):
        (run_there / name / "rollouts").mkdir(parents=True, exist_ok=True)
        shutil.copy("runs/run/config.yaml", run_there / name)
    whole = Path("runs/run/rollouts/step_000002.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    Path("torn/rollouts/step_000002.jsonl").write_text(whole[:-20])
    Path("lacking/rollouts/step_000002.jsonl").write_text("".join(lines[:14] + lines[15:]))
    Path("foreign/rollouts/step_000001.jsonl").write_text(lines[0].replace('"completion"', '"text"'))
    Path("mistyped/rollouts/step_000001.jsonl").write_text(re.sub(r'("length"): \d+', r"\1: null", lines[0]))
    texts = re.sub(r'"rewards": {[^}]*}', '"rewards": {"early": "high"}', lines[0])
    Path("texts/rollouts/step_000001.jsonl").write_text(texts)
    assert_refused(options, says, capsys)
