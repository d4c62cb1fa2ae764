"""`data`, in this process: every kind of fault in a file, what is told of them, and what is written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from char_tokenizer import char_tokenizer

from hybrid_grpo.__main__ import main

ROWS: list[dict[str, Any]] = [
    {"prompt": "How many legs have two cats and a spider, if one of the cats lost a leg?", "answer": "15"},
    {"prompt": "How many legs have  two cats and a SPIDER, if one of the cats lost a leg?", "answer": "16"},
    {"prompt": "How many legs have two cats and one spider, if one of the cats lost a leg?", "answer": "15"},
    {"prompt": None, "answer": "1"},
    {"prompt": " ", "answer": "1"},
    {"prompt": "An \ufffd", "answer": "1"},
    {"prompt": "Half a pair: \ud83d", "answer": "1"},
    {"prompt": "Who knows?", "answer": "N/A"},
    {"prompt": "long " * 40, "answer": "1"},
    {"prompt": "Name a prime number.", "answer": "2"},
    {"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"},
]
FOUND = {
    "unreadable": [3, 4],
    "encoding": [5, 6],
    "answers": [7],
    "lengths": [8],
    "duplicates": [1],
    "near_duplicates": [2],
    "overlap": [9],
}


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write("rows.jsonl", ROWS)
    write("q.jsonl", [{"question": "What?"}])
    write("held_out.jsonl", [{"prompt": "name a prime number"}])
    char_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}").save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen2"}')
    Path("recipe.yaml").write_text(
        "policy: {model: model}\ndata: {path: rows.jsonl, eval_path: held_out.jsonl, max_prompt_tokens: 100}\n"
        "rewards: exact_match\nrollout: {prompts_per_step: 4}\n"
    )
    return tmp_path


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def test_faults_of_every_kind_are_told_and_left_out(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["data", "--config", "recipe.yaml", "--clean.output", "kept.jsonl", "--clean.report", "report.json"]) == 0
    )
    assert read("kept.jsonl") == [ROWS[0], ROWS[10]]
    (report,) = read("report.json")
    assert {kind: [row["row"] for row in found["rows"]] for kind, found in report["found"].items()} == FOUND
    assert (report["rows"], report["kept"], report["not_looked_for"]) == (11, 2, [])
    assert report["lengths"]["unit"] == "tokens" and report["lengths"]["longest"] == 160
    told = capsys.readouterr().out
    assert "languages" not in told  # it is off
    for kind, rows in FOUND.items():
        assert re.search(rf"^{kind} +{len(rows)} .* dropped *$", told, re.M) and f"{kind}: row {rows[0]} " in told
    assert "row 1 has the prompt of row 0, with another answer: 'How many" in told
    # What was written is clean.
    assert main(["data", "--config", "recipe.yaml", "--data.path", "kept.jsonl", "--clean.report", "report.json"]) == 0
    assert all(found["count"] == 0 for found in read("report.json")[0]["found"].values())


def test_short_prompts_that_are_alike_are_reported_and_kept(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 75 sums, 43 were dropped as near duplicates, of each other or of held-out sums."""
    sums = [{"prompt": f"What is {n % 9 + 1} + {n // 9 + 1}?", "answer": "1"} for n in range(75)]
    write("sums.jsonl", sums)
    write("held_out.jsonl", [{"prompt": "What is 9 + 9 + 1?"}])
    assert main(["data", "--data.path=sums.jsonl", "--data.eval_path=held_out.jsonl", "--clean.output=kept.jsonl"]) == 0
    told = capsys.readouterr().out
    short = [int(n) for n in re.findall(r"(?:near_duplicates|overlap) .* but for (\d+) short ones", told)]
    assert len(short) == 2 and short[0] > 40 and read("kept.jsonl") == sums


def test_a_kind_is_looked_for_dropped_or_neither_as_it_is_set(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data.path", "rows.jsonl", "--clean.output", "-", "--clean.answers", "report", "--clean.encoding", "off"]
    assert main(["data", *given, "--clean.near_duplicates=off", "--clean.unreadable=report", "--clean.examples=1"]) == 0
    out, err = capsys.readouterr()
    written = [json.loads(line) for line in out.splitlines()]
    assert [row["answer"] for row in written] == [row["answer"] for n, row in enumerate(ROWS) if n != 1]
    assert re.search(r"^answers +1 +9.09% +kept *$", err, re.M) and not re.search("^(encoding|near_dup)", err, re.M)
    assert len(re.findall("^unreadable: ", err, re.M)) == 1
    assert "not looked for: lengths in tokens: set policy.model" in err and "prompts in words: shortest 1," in err
    assert "not looked for: overlap: no held-out prompts: set data.eval_split or data.eval_path" in err


def test_rows_are_written_as_the_task_reads_them_again(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The instruction of the task is in every prompt, and makes no two of them alike."""
    rows = [{"question": f"What is {n} plus {n * n}?", "answer": f"It is\n#### {n + n * n}"} for n in range(20)]
    rows += [{"question": "And 1?", "answer": "It is\n####"}, {"question": "And no answer?", "answer": None}, rows[5]]
    write("sums.jsonl", rows)
    assert main(["data", "--data.task", "gsm8k", "--data.path", "sums.jsonl", "--clean.output", "kept.jsonl"]) == 0
    assert read("kept.jsonl") == rows[:20]
    told = capsys.readouterr().out
    assert "unreadable: row 21 cannot be read: data.task gsm8k: row 21 (from 0) of" in told
    assert "answers: row 20 has an answer (answer) that has nothing after" in told


def test_languages_are_told_apart_where_this_is_asked_for(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    german = {"prompt": "Wie viele Beine haben zwei Katzen und eine Spinne zusammen?", "answer": "16"}
    write("both.jsonl", [ROWS[0], german])
    given = ["data", "--data.path", "both.jsonl", "--clean.languages", "drop", "--clean.output", "kept.jsonl"]
    assert main(given) == 0 and read("kept.jsonl") == [ROWS[0]]
    assert "languages: row 1 is in de: 'Wie viele" in capsys.readouterr().out
    assert main([*given, "--clean.expected_languages", "[en, de]"]) == 0 and read("kept.jsonl") == [ROWS[0], german]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--clean.overlap=refuse"], "clean.overlap: 1 rows of rows.jsonl [train] are also held-out prompts"),
        (["--clean.output=rows.jsonl"], "clean.output rows.jsonl would replace the rows of data.path"),
        (["--clean.report=held_out.jsonl"], "clean.report held_out.jsonl would replace the held-out rows"),
        (["--clean.output=a", "--clean.report=a"], "clean.output and clean.report are both a: give two files"),
        (["--clean.answer_column=anser"], "clean.answer_column anser: there is no such column: did you mean answer?"),
        (["--data.prompt_column=promt"], "data.prompt_column promt: row 0 (from 0) of rows.jsonl [train] has none"),
        (["--data.eval_path=q.jsonl"], "data.prompt_column prompt: q.jsonl has no such column: known are question"),
        (
            ["--data.path=", "--data.mixture=[{path: rows.jsonl}]"],
            "data.mixture is for train: data reads one source: remove it",
        ),
        (["--clean.similarity=0"], "clean.similarity 0 must be in (0, 1]"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    there: Path, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "--config", "recipe.yaml", *given]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert read("rows.jsonl") == ROWS


def test_a_package_that_is_missing_is_named(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hybrid_grpo.features.cleaning.command.find_spec", lambda name: None)
    assert main(["data", "--data.path", "rows.jsonl"]) == 2
    assert "clean.near_duplicates needs rensa, which is not installed: pip install 'hybrid_grpo[clean]', or set" in (
        capsys.readouterr().err
    )
    assert main(["data", "--data.path", "rows.jsonl", "--clean.near_duplicates=off", "--clean.encoding=off"]) == 0


def test_the_command_is_listed_and_has_no_settings_of_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0 and re.search(r"^  data +duplicates, overlap", capsys.readouterr().out, re.M)
    with pytest.raises(SystemExit):
        main(["data", "--help"])
    # `data` takes recipes of sft too, whose settings are not its own.
    told = capsys.readouterr().out
    assert "--clean.output" in told and "--sft." not in told
