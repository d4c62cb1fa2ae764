"""`generate`, in this process but where its process matters, on a tiny model and prompts of letters."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from launching import make_task
from paths import ROOT
from refusals import refused

from hybrid_grpo.__main__ import main

pytestmark = pytest.mark.process
WORDS = ["dcab=", "zxy=", "hello=", "qrs=", "tac=", "god=", "mnbv="]
MODEL = ["--policy.model=model", "--policy.dtype=float32", "--rollout.max_completion_tokens=8"]
DATA = ["--data.path=words.jsonl"]
REWARDS = """
import json
from pathlib import Path

def kept(prompts, completions, **columns):
    Path("kept.json").write_text(json.dumps(dict(zip(prompts, completions))))
    return [0.0] * len(completions)
"""
ROLLOUT = """
import json
import sys
from hybrid_grpo import engine
from hybrid_grpo.config import DataConfig, EngineConfig, PolicyConfig, RolloutConfig
from hybrid_grpo.data.prompts import read_prompts
from hybrid_grpo.model.limits import stop_ids
from hybrid_grpo.model.loading import load_config, load_tokenizer
from hybrid_grpo.policy import Policy

engine.start()
tokenizer = load_tokenizer("model")
policy = Policy(PolicyConfig("model", "float32"), EngineConfig(0), tokenizer, total_steps=1)
prompts, _ = read_prompts(DataConfig("words.jsonl"), tokenizer)
config = RolloutConfig(num_generations=3, max_completion_tokens=8, temperature=0.8)
rollout, _ = policy.rollout(prompts, config, stop_ids("model", tokenizer, [], load_config("model")), seed=5, step=0)
json.dump([[c.text, c.finish, sum(c.logp)] for c in rollout.completions], open("rollout.json", "w"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_task(tmp_path_factory.mktemp("generate"))
    rows = [{"prompt": word, "answer": "".join(sorted(word[:-1]))} for word in WORDS]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "kept_rewards.py").write_text(REWARDS)
    (folder / "rollout.py").write_text(ROLLOUT)
    return folder


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # What other processes sample on the processor is compared by equality.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield


def rows_of(text: str) -> list[dict[str, Any]]:
    """JSON lines, in the order of the prompts and their samples."""
    assert text.endswith("\n")
    rows = [json.loads(line, parse_constant=pytest.fail) for line in text[:-1].split("\n")]
    return sorted(rows, key=lambda row: (row["id"], row["sample"]))


class Terminal:
    """The command with its standard streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        self.err = ""

    def generate(self, *arguments: str, stdin: str | bytes = b"", typed: bool = False) -> list[dict[str, Any]]:
        out = self.ends(0, *arguments, stdin=stdin, typed=typed)
        return rows_of(out) if out else []

    def refused(self, *arguments: str, stdin: str | bytes = b"") -> str:
        assert self.ends(2, *arguments, stdin=stdin) == ""
        assert self.err.startswith("hybrid-grpo: error: ") and self.err.count("\n") == 1
        return self.err.removeprefix("hybrid-grpo: error: ")

    def ends(self, status: int, *arguments: str, stdin: str | bytes = b"", typed: bool = False) -> str:
        stream = io.TextIOWrapper(io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin))
        stream.isatty = lambda: typed  # type: ignore[method-assign]
        self.monkeypatch.setattr(sys, "stdin", stream)
        assert main(["generate", *MODEL, *arguments]) == status
        out, self.err = self.capsys.readouterr()
        return out


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capsys)


def test_a_line_for_every_completion(terminal: Terminal) -> None:
    rows = terminal.generate(*DATA, "--rollout.num_generations=3")
    assert [(row["id"], row["sample"]) for row in rows] == [(i, k) for i in range(len(WORDS)) for k in range(3)]
    for row in rows:
        assert row["prompt"] == WORDS[row["id"]]
        assert row["columns"] == {"answer": "".join(sorted(row["prompt"][:-1]))}
        # The stop token is one of the tokens and none of the text, as is padding.
        assert row["tokens"] == 8 if row["finish"] == "length" else 1 <= row["tokens"] <= 8
        assert len(row["completion"]) <= row["tokens"] - (row["finish"] == "stop")
        assert -8 * 10 < row["logp"] < 0
    assert len({(row["id"], row["completion"]) for row in rows}) > 2 * len(WORDS)
    assert "temperature 1, " in terminal.err and "3 of each prompt, run.seed 0" in terminal.err
    assert "7 of 7 rows kept" in terminal.err


def test_tokens_and_their_log_probabilities_are_written_where_they_are_asked_for(terminal: Terminal) -> None:
    rows, plain = (terminal.generate(*DATA, *more) for more in (["--generate.token_logp=true"], []))
    assert [{k: v for k, v in row.items() if k not in ("token_ids", "token_logp")} for row in rows] == plain
    for row in rows:
        assert len(row["token_ids"]) == len(row["token_logp"]) == row["tokens"]
        assert sum(row["token_logp"]) == pytest.approx(row["logp"], rel=1e-12)


def test_the_completions_are_those_of_step_0_of_a_rollout(terminal: Terminal, folder: Path) -> None:
    options = ["--rollout.num_generations=3", "--rollout.temperature=0.8", "--run.seed=5"]
    rows = terminal.generate(*DATA, *options)
    done = forks.run("rollout.py")
    assert done.status == 0, done.err
    rollout = json.loads((folder / "rollout.json").read_text())
    assert [[row["completion"], row["finish"]] for row in rows] == [row[:2] for row in rollout]
    assert [row["logp"] for row in rows] == pytest.approx([row[2] for row in rollout], rel=1e-5)
    others = terminal.generate(*DATA, *options[:2], "--run.seed=6")
    assert sum(a["completion"] != b["completion"] for a, b in zip(rows, others, strict=True)) > len(rows) // 2


def test_neither_slots_nor_neighbors_change_a_completion(terminal: Terminal) -> None:
    rows = terminal.generate(*DATA, "--rollout.num_generations=2")
    few = terminal.generate(*DATA, "--rollout.num_generations=2", "--rollout.max_slots=3", "--data.limit=4")
    assert [row["completion"] for row in few] == [row["completion"] for row in rows[:8]]


def test_text_and_objects_come_in(terminal: Terminal) -> None:
    rows = terminal.generate(*DATA)
    text = terminal.generate(stdin="\n".join(["", *WORDS, "  "]))
    assert [row["completion"] for row in text] == [row["completion"] for row in rows]
    assert all("columns" not in row for row in text)
    objects = terminal.generate("--data.path=-", stdin=Path("words.jsonl").read_bytes())
    assert [{**row, "logp": 0} for row in objects] == [{**row, "logp": 0} for row in rows]
    mixed = terminal.generate(stdin=f'{WORDS[0]}\r\n{{"prompt": "{WORDS[1]}", "n": NaN}}\n')
    assert [row["completion"] for row in mixed] == [row["completion"] for row in rows[:2]]
    assert [row["columns"] for row in mixed] == [{"n": None}, {"n": None}]


def test_prompts_may_be_typed_until_the_end_of_the_input(terminal: Terminal) -> None:
    rows = terminal.generate(stdin="\n".join(WORDS), typed=True)
    assert [row["prompt"] for row in rows] == WORDS
    assert terminal.err.startswith("one prompt per line, until the end of the input (Ctrl-D)\n")


def test_greedy_is_that_of_eval_and_ends_by_the_same_rules(terminal: Terminal, folder: Path) -> None:
    ends = ["--rollout.stop_strings=[z, '=']", "--rollout.min_completion_tokens=3"]
    rows = terminal.generate(*DATA, "--rollout.temperature=0", *ends)
    assert {row["finish"] for row in rows} == {"stop", "length"} and min(row["tokens"] for row in rows) == 3
    arguments = [*MODEL, *ends, *DATA, "--data.eval_path=words.jsonl"]
    arguments += ["--rewards=[{function: 'kept_rewards.py:kept', batch_size: 7}]"]
    done = forks.run("-m", "hybrid_grpo", "eval", *arguments)
    assert done.status == 0, done.err
    assert json.loads((folder / "kept.json").read_text()) == {row["prompt"]: row["completion"] for row in rows}


def test_the_decoder_of_the_configuration_is_used(terminal: Terminal) -> None:
    rows = terminal.generate(*DATA, "--rollout.num_generations=2")
    other = terminal.generate(*DATA, "--rollout.num_generations=2", "--rollout.decoder=transformers")
    assert [row["completion"] for row in other] == [row["completion"] for row in rows]
    assert "decoder transformers" in terminal.err


def test_every_rank_writes_its_share(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        terminal.generate(*DATA, f"--generate.output={tmp_path / 'out.jsonl'}")
        assert ("7 of 7 rows" in terminal.err) == (rank == "0")
    parts = [rows_of((tmp_path / f"out.{rank}.jsonl").read_text()) for rank in range(2)]
    assert [len(part) for part in parts] == [3, 4]
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    whole = terminal.generate(*DATA)
    assert [row["completion"] for part in parts for row in part] == [row["completion"] for row in whole]


def test_a_reader_who_has_had_enough_ends_it_quietly() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hybrid_grpo", "generate", *MODEL, "--data.path=train.jsonl"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    assert json.loads(process.stdout.readline())["completion"] is not None
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(timeout=120) == 0
    assert said.startswith("data: ") and said.count("\n") == 2


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [*refused("generate"), ([], b"a=\n\n\xe4=\n", "data.path standard input line 3 is not JSON ('utf-8' codec")],
)
def test_a_mistake_gives_one_line_and_status_2(
    terminal: Terminal, arguments: list[str], stdin: str | bytes, says: str
) -> None:
    assert says in terminal.refused(*arguments, stdin=stdin)


def test_it_takes_the_recipe_of_a_run(terminal: Terminal, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "run: {seed: 3, steps: 9}\nengine: {zero_stage: 2}\ngrpo: {beta: 0.1}\nrewards: [{function: no_such_thing}]\n"
        "data: {path: words.jsonl, eval_path: not_here.jsonl, over_long: drop, max_prompt_tokens: 4}\n"
        "rollout: {temperature: 0.5, num_generations: 2}\n"
    )
    rows = terminal.generate("--config", str(recipe))
    assert [row["id"] for row in rows] == [1, 1, 3, 3, 4, 4, 5, 5]
    assert "4 of 7 rows kept, 3 dropped for an over-long prompt" in terminal.err
    assert "2 of each prompt, run.seed 3, temperature 0.5, " in terminal.err
    options = ["--rollout.num_generations=2", "--rollout.temperature=0.5", "--run.seed=3"]
    assert rows == terminal.generate(*DATA, *options, "--data.over_long=drop", "--data.max_prompt_tokens=4")
