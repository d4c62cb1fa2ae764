"""Blocks of rows from files and from streams of `datasets`: complete, in a seeded order, readable from their place."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.sources import Source, evaluation_source, read_rows, training_source
from hybrid_grpo.features.streaming import row_stream
from hybrid_grpo.features.streaming.row_stream import Place, RowStream, Shard
from hybrid_grpo.features.streaming.settings import StreamingConfig

ROWS = [{"prompt": f"p{number}", "n": number} for number in range(57)]


def jsonl(folder: Path) -> str:
    lines = [json.dumps(row) + "\n" for row in ROWS]
    # A line is not a row: blank ones are passed over, and letters take more than a byte.
    (folder / "rows.jsonl").write_text("\n".join(lines).replace("p5", "pé"), encoding="utf-8")
    return str(folder / "rows.jsonl")


def parquet(folder: Path) -> str:
    """Three files, of row groups that are shorter than a block or cross its end."""
    (folder / "files").mkdir()
    for number in range(3):
        rows = datasets.Dataset.from_list(ROWS[number * 19 : (number + 1) * 19])
        rows.to_parquet(str(folder / "files" / f"train-0000{number}-of-00003.parquet"), batch_size=5)
    return str(folder / "files")


def saved(folder: Path) -> str:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"), num_shards=3)
    return str(folder / "saved")


def hub(folder: Path) -> datasets.IterableDataset:
    """What `load_dataset` gives of a name on the hub."""
    files = {"train": f"{parquet(folder)}/*.parquet"}
    return datasets.load_dataset("parquet", data_files=files, streaming=True, cache_dir=str(folder / "cache"))["train"]


def generated(folder: Path) -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(lambda: iter(ROWS))


def stream(path, seed=3, shuffle=True, block_rows=8) -> RowStream:
    return RowStream(Source(path, "train", streaming=True), seed, shuffle, block_rows)


def read(opened: RowStream, blocks: int) -> list:
    place, found = Place(), []
    for _ in range(blocks):
        found.append(opened.block(place))
        place = found[-1].after
    return found


def numbers(blocks: list, epoch: int) -> list[int]:
    return [streamed.row["n"] for block in blocks if block.place.epoch == epoch for streamed in block.rows]


@pytest.mark.parametrize("make", [jsonl, parquet, saved, hub, generated])
def test_a_pass_has_every_row_once_and_a_block_is_read_again_from_its_place_alone(make, tmp_path):
    source = make(tmp_path)
    blocks = read(stream(source), 17)
    first, second = numbers(blocks, 0), numbers(blocks, 1)
    assert sorted(first) == sorted(second) == list(range(57)) and first != second
    assert first != numbers(read(stream(source, seed=4), 8), 0)
    for block in reversed(blocks):
        assert stream(source).block(deepcopy(block.place)) == block
    in_order = [row for block in read(stream(source, shuffle=False), 8) for row in block.rows]
    assert [streamed.row["n"] for streamed in in_order] == list(range(57))
    shards = len({streamed.shard for streamed in in_order})
    assert [streamed.number for streamed in in_order] == list(range(57 // shards)) * shards


def test_a_million_rows_are_read_block_by_block():
    pulled = []

    def rows():
        for number in range(1_000_000):
            pulled.append(number)
            yield {"n": number}

    blocks = read(stream(datasets.IterableDataset.from_generator(rows), block_rows=500), 3)
    assert 1500 <= len(pulled) <= 1502
    assert [sorted(streamed.row["n"] for streamed in block.rows) for block in blocks] == [
        list(range(start, start + 500)) for start in (0, 500, 1000)
    ]


def test_of_a_name_on_the_hub_nothing_is_downloaded_also_not_for_evaluation(tmp_path, monkeypatch):
    """Files here stand for those on the hub, where they are read by the same code."""
    parquet(tmp_path)
    datasets.Dataset.from_list(ROWS[:5]).to_parquet(str(tmp_path / "files/test-00000-of-00001.parquet"))
    load, asked = datasets.load_dataset, []

    def load_dataset(name, subset, streaming):
        asked.append((name, subset, streaming))
        return load(str(tmp_path / "files"), streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = DataConfig(path="owner/name", subset="some", eval_split="test", eval_limit=3)

    def held_out(**changes) -> Source:
        data = replace(config, **changes)
        return StreamingConfig(enabled=True).held_out_source(evaluation_source(data), data)

    opened = RowStream(replace(training_source(config), streaming=True), 0, True, 30)
    assert opened.shards == 3 and sorted(numbers(read(opened, 2), 0)) == list(range(57))
    assert read_rows(held_out()) == ROWS[:3]
    assert asked == [("owner/name", "some", True)] * 2
    with pytest.raises(UserError, match=r"^data.eval_split test\[:2\] needs all rows of the split"):
        read_rows(held_out(eval_split="test[:2]"))
    with pytest.raises(UserError, match=r"^data.eval_split train is the split that streaming.enabled trains on"):
        held_out(eval_split="train")
    other = held_out(eval_path=str(tmp_path / "files"), eval_split="train")
    assert not other.streaming and read_rows(other) == ROWS[:3]


class ConnectError(Exception):
    """An error of a library for connections that is no OSError."""

    __module__ = "httpx"


def flaky(monkeypatch, error: Exception, failures: dict[int, int]) -> tuple[RowStream, list[float]]:
    """A stream of ten rows that fails before the rows of these numbers, so often; and how long it has waited, by a
    clock that nothing else moves."""
    waits: list[float] = []

    def rows(start):
        for number in range(start or 0, 10):
            if failures.get(number, 0):
                failures[number] -= 1
                raise error
            yield {"n": number}, number + 1

    monkeypatch.setattr(row_stream.time, "sleep", waits.append)
    monkeypatch.setattr(row_stream.time, "monotonic", lambda: 1000 + sum(waits))
    monkeypatch.setattr(row_stream, "open_shards", lambda source: [Shard("far", rows)])
    return stream("far", shuffle=False, block_rows=4), waits


@pytest.mark.parametrize("error", [ConnectionError("gone"), OSError("gone"), ConnectError("gone")])
def test_a_source_that_cannot_be_reached_is_tried_again_where_it_was(error, monkeypatch, capsys):
    opened, waits = flaky(monkeypatch, error, {0: 1, 5: 3, 6: 1})
    opened.patient = True
    assert numbers(read(opened, 3), 0) == list(range(10)) and waits == [1, 1, 2, 4, 1]
    said = capsys.readouterr().err
    assert f"data.path far cannot be read at row 5 (from 0) ({type(error).__name__} gone): trying again in 4 s" in said


def test_patience_ends_and_the_block_can_still_be_read(monkeypatch):
    opened, waits = flaky(monkeypatch, ConnectionError("gone"), {5: 12})
    first = opened.block(Place())
    with pytest.raises(UserError, match=r"^data.path far cannot be read at row 5 \(from 0\): ConnectionError gone"):
        opened.block(first.after)
    assert waits == [], "before the run nobody waits"
    opened.patient = True
    with pytest.raises(UserError, match="check the network"):
        opened.block(first.after)
    assert row_stream.PATIENCE_S < sum(waits) <= row_stream.PATIENCE_S + 60
    assert numbers([opened.block(first.after)], 0) == [4, 5, 6, 7]


def test_what_is_no_row_is_named_and_not_tried_again(monkeypatch, tmp_path):
    opened, waits = flaky(monkeypatch, ValueError("no number"), {5: 1})
    opened.patient = True
    with pytest.raises(UserError, match=r"^data.path far cannot be read at row 5 .*: ValueError no number: correct"):
        read(opened, 2)
    assert waits == []
    monkeypatch.undo()
    (tmp_path / "rows.jsonl").write_text('{"n": 0}\n\n{"n": 1}\n{"n": \n')
    lines = stream(str(tmp_path / "rows.jsonl"), block_rows=2)
    with pytest.raises(UserError, match=r"^data.path .*rows.jsonl line 4 is not JSON"):
        read(lines, 2)


@pytest.mark.parametrize(
    ("path", "split", "message"),
    [
        ([{"n": 0}], "train", "^data.path is a list, which is already in memory: take out streaming$"),
        (datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}), "train", "no such split"),
        ("rows.txt", "train", "neither JSONL nor parquet"),
    ],
)
def test_what_cannot_be_streamed_is_refused(path, split, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.txt").write_text("a")
    with pytest.raises(UserError, match=message):
        RowStream(Source(path, split, streaming=True), 0, True, 8).block(Place())
