"""Runs that train on a stream: on ranks, resumed, and with a row that cannot be read."""

import json
from pathlib import Path

import forks
import pytest
from paths import SUPPORT
from workshop import Workshop

TRAIN = [
    *("train", "--config", "train.yaml", "--run.steps=4", "--data.eval_path=null", "--rollout.max_completion_tokens=4"),
    *("--data.streaming=true", "--data.stream_block=5", "--data.max_prompt_tokens=9"),
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    workshop = Workshop(tmp_path_factory.mktemp("streams"))
    yield workshop
    workshop.close()


def run(workshop: Workshop, *commands: list[str], ranks: int = 1) -> forks.Done:
    path = workshop.write("commands.json", json.dumps([[*TRAIN, *command] for command in commands]))
    return forks.run(SUPPORT / "stream_programs.py", path, world=ranks, cwd=workshop.folder)


def trained(folder: Path) -> tuple[list[dict], dict[str, bytes]]:
    """Metrics that measure neither time nor memory, and all rollouts and weights of a run."""
    measured = ("time/", "throughput/", "memory/")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = [*folder.glob("rollouts/*"), folder / "model" / "model.safetensors"]
    numbers = [{name: v for name, v in line.items() if not name.startswith(measured)} for line in lines]
    return numbers, {path.name: path.read_bytes() for path in files}


def sampled(folder: Path) -> list[list[tuple]]:
    """Prompts and completions of every step."""
    steps = [path.read_text().splitlines() for path in sorted(folder.glob("rollouts/*"))]
    return [sorted((row["prompt_id"], row["completion"]) for row in map(json.loads, lines)) for lines in steps]


@pytest.fixture(scope="module")
def alone(workshop) -> Path:
    """A run on one rank that is not stopped."""
    assert run(workshop, ["--run.name=alone"]).status == 0
    return workshop.folder / "runs/alone"


@pytest.mark.ranks
def test_a_run_that_goes_on_is_to_the_bit_the_run_that_was_not_stopped(workshop, alone):
    """Twelve rows in blocks of five, four prompts a step: the second step ends within a block, and the fourth begins
    with the second pass. On two ranks the first one reads for both, and they sample what one rank samples."""
    parts = "--run.name=parts"
    done = run(workshop, ["--run.name=whole"], [parts, "--run.steps=2"], [parts, "--run.resume=auto"], ranks=2)
    assert done.status == 0, done.out[-2000:] + done.err[-3000:]
    runs = workshop.folder / "runs"
    assert trained(runs / "parts") == trained(runs / "whole")
    assert "# data: streamed, first block 5 rows" in (runs / "parts/config.yaml").read_text()
    assert [line["data/streamed_rows"] for line in trained(runs / "whole")[0]] == [4, 8, 12, 16]
    assert sampled(runs / "alone") == sampled(runs / "whole")


@pytest.mark.ranks
def test_a_row_that_cannot_be_read_stops_the_run_which_goes_on_with_the_row_mended(workshop, alone):
    rows = (workshop.folder / "train.jsonl").read_text()
    bad, mended = workshop.write("bad.jsonl", rows.replace('"ewq="', '"ewq=')), ["--run.name=mended"]
    done = run(workshop, [*mended, "--data.path=bad.jsonl"])
    assert done.status == 2 and done.err.count("\n") == 1, done.err
    assert "data.path bad.jsonl line 11 is not JSON" in done.err
    assert done.err.endswith("; the run is saved as it was after step 2\n")
    bad.write_text(rows)
    done = run(workshop, [*mended, "--data.path=bad.jsonl", "--run.resume=auto"])
    assert done.status == 0, done.err[-3000:]
    assert trained(workshop.folder / "runs/mended") == trained(alone)
