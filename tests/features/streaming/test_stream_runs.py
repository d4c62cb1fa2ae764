"""Runs that train on a stream: on ranks, resumed, and with a row that cannot be read."""

import json
from pathlib import Path

import forks
import pytest
from workshop import Workshop

SETTINGS = [
    *("--config", "train.yaml", "--run.steps=4", "--data.eval_path=null", "--rollout.max_completion_tokens=4"),
    *("--streaming.enabled=true", "--streaming.block=5", "--data.max_prompt_tokens=9"),
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    workshop = Workshop(tmp_path_factory.mktemp("streams"))
    yield workshop
    workshop.close()


def run(workshop: Workshop, *commands: str, ranks: int = 1) -> forks.Done:
    """Commands with the settings of all, one after the other, each a run of the stream."""
    words = [command.split() for command in commands]
    path = workshop.write("commands.json", json.dumps([[name, *SETTINGS, *more] for name, *more in words]))
    return forks.run(Path(__file__).with_name("programs.py"), path, world=ranks, cwd=workshop.folder, timeout=600.0)


def trained(folder: Path) -> tuple[list[dict], dict[str, bytes]]:
    """Metrics that measure neither time nor memory, and all rollouts and weights of a run."""
    measured = ("time/", "throughput/", "memory/")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = [*folder.glob("rollouts/*.jsonl"), folder / "model" / "model.safetensors"]
    numbers = [{name: v for name, v in line.items() if not name.startswith(measured)} for line in lines]
    return numbers, {path.name: path.read_bytes() for path in files}


def sampled(folder: Path) -> list[list[tuple]]:
    """Prompts and completions of every step."""
    steps = [path.read_text().splitlines() for path in sorted(folder.glob("rollouts/*.jsonl"))]
    return [sorted((row["prompt_id"], row["completion"]) for row in map(json.loads, lines)) for lines in steps]


@pytest.mark.ranks
def test_a_run_goes_on_to_the_bit_on_any_number_of_ranks_and_after_a_row_that_could_not_be_read(workshop):
    """Twelve rows in blocks of five, four prompts a step: the second step ends within a block, and the fourth begins
    with the second pass. On two ranks the first one reads for both, and they sample what one rank samples."""
    rows = (workshop.folder / "train.jsonl").read_text()
    bad = workshop.write("bad.jsonl", rows.replace('"ewq="', '"ewq='))
    done = run(
        workshop,
        "train --run.name=whole",
        "train --run.name=parts --run.steps=2",
        "train --run.name=parts --run.resume=auto",
        "train --run.name=mended --data.path=bad.jsonl",
        ranks=2,
    )
    runs = workshop.folder / "runs"
    assert trained(runs / "parts") == trained(runs / "whole"), done.err[-3000:]
    assert "# data: streamed, first block 5 rows" in (runs / "parts/config.yaml").read_text()
    assert [line["data/streamed_rows"] for line in trained(runs / "whole")[0]] == [4, 8, 12, 16]
    stop = "error: data.path bad.jsonl line 11 is not JSON"
    assert done.status == 2 and f"hybrid-grpo: {stop}" in done.err and f"hybrid-grpo [rank 1]: {stop}" in done.err
    assert done.err.count("; the run is saved as it was after step 2\n") == 2 and "Traceback" not in done.err

    bad.write_text(rows)
    done = run(
        workshop,
        "train --run.name=mended --data.path=bad.jsonl --run.resume=auto",
        "plan",
    )
    assert done.status == 0, done.err[-3000:]
    assert sampled(runs / "mended") == sampled(runs / "whole")
    assert "\ndata: streamed, first block 5 rows of which 5 were looked at: train.jsonl" in done.out
    assert '"eval/heldout/accuracy"' in done.out
