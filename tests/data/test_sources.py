import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, Features, Json

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.sources import Source, evaluation_source, read_rows, training_source

ROWS = [{"prompt": f"question {number}", "answer": number} for number in range(5)]


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def save(path: Path, dataset: Dataset | DatasetDict) -> str:
    dataset.save_to_disk(str(path))
    return str(path)


OTHER = [{"prompt": "t", "answer": 9}]


def make_jsonl(folder: Path) -> str:
    return write_jsonl(folder / "rows.jsonl", ROWS)


def make_saved(folder: Path) -> str:
    return save(folder / "saved", Dataset.from_list(ROWS))


def make_saved_dict(folder: Path) -> str:
    splits = {"test": Dataset.from_list(OTHER), "train": Dataset.from_list(ROWS)}
    return save(folder / "saved", DatasetDict(splits))


def make_jsonl_folder(folder: Path) -> str:
    write_jsonl(folder / "files" / "test.jsonl", OTHER)
    return str(Path(write_jsonl(folder / "files" / "train.jsonl", ROWS)).parent)


def make_parquet(folder: Path) -> str:
    for shard, rows in enumerate((ROWS[:2], ROWS[2:])):
        path = folder / "files" / "data" / f"train-0000{shard}-of-00002.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_list(rows).to_parquet(str(path))
    return str(folder / "files")


SOURCES = [make_jsonl, make_saved, make_saved_dict, make_jsonl_folder, make_parquet]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("make", SOURCES)
def test_every_kind_of_source_gives_the_same_rows_in_order(make, tmp_path):
    path = make(tmp_path)
    assert read_rows(Source(path)) == ROWS
    assert read_rows(Source(path, limit=3)) == ROWS[:3]
    assert read_rows(Source(path, limit=100)) == ROWS


@pytest.mark.parametrize("make", [make_saved_dict, make_jsonl_folder])
def test_a_split_is_chosen_by_name(make, tmp_path):
    path = make(tmp_path)
    assert read_rows(Source(path, "test")) == [{"prompt": "t", "answer": 9}]
    with pytest.raises(UserError, match=r"^data.split tset: .*: set data.split to (test or train|train or test)$"):
        read_rows(Source(path, "tset"))
    with pytest.raises(UserError, match=r"^data.eval_split is not set, and data.eval_path .*choose one$"):
        read_rows(Source(path, None, path_setting="data.eval_path", split_setting="data.eval_split"))


@pytest.mark.parametrize("make", [make_jsonl, make_parquet, make_saved])
def test_without_splits_everything_is_train_and_no_other_name_passes(make, tmp_path):
    path = make(tmp_path)
    assert read_rows(Source(path, None)) == ROWS
    # Evaluating on "test" of a plain file would be evaluating on the rows that are trained on.
    with pytest.raises(UserError, match=r"^data.eval_split test: .* has train: give held-out rows in data.eval_path"):
        read_rows(evaluation_source(DataConfig(path=path, eval_split="test")))
    with pytest.raises(UserError, match=r"^data.eval_split test: .* has train: leave it out"):
        read_rows(evaluation_source(DataConfig(path="x", eval_path=path, eval_split="test")))


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path_factory, capsys):
    """`datasets` takes the files of one format, and leaves out those whose names are of no split if others' are."""
    folder = tmp_path_factory.mktemp("rows")  # a name with "test" would be a split's
    write_jsonl(folder / "train.jsonl", ROWS)
    (folder / "dataset_info.json").write_text("{}")
    assert read_rows(Source(str(folder))) == ROWS and not capsys.readouterr().err
    (folder / "more.csv").write_text("prompt\na\n")
    assert read_rows(Source(str(folder))) == ROWS
    assert "1 of its 3 files are not read, such as" in capsys.readouterr().err
    assert len(read_rows(Source(f"{folder}/*[lv]"))) == len(ROWS) + 1


def test_jsonl_columns_may_mix_types_and_lack_keys(tmp_path):
    chat = [{"role": "user", "content": "é"}]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": chat, "level": 2}])
    assert read_rows(Source(path)) == [{"prompt": "a", "level": None}, {"prompt": chat, "level": 2}]


def test_parquet_keeps_mixed_columns_and_does_not_invent_any_from_its_folders(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}]
    path = tmp_path / "level=3" / "rows.parquet"
    path.parent.mkdir()
    Dataset.from_list(rows, features=Features({"prompt": Json()})).to_parquet(str(path))
    assert read_rows(Source(str(path))) == rows


def test_a_data_set_saved_in_another_output_format_gives_plain_rows(tmp_path):
    """Saved as torch, numbers came back as tensors and reached reward functions as such."""
    path = save(tmp_path / "saved", Dataset.from_list(ROWS).with_format("torch"))
    assert [type(row["answer"]) for row in read_rows(Source(path))] == [int] * 5


@pytest.mark.parametrize("text, message", [
    (b'{"prompt": "a"}\n\n{"prompt": \n', "rows.jsonl line 3 is not JSON "),
    (b'{"prompt": "a"}\n["a"]\n', "rows.jsonl line 2 is a list: write one object per line$"),
    (b'{"prompt": "a"}\n3\n', "rows.jsonl line 2 is an int: write one object per line$"),
    (b'{"prompt": "\xff"}\n', "rows.jsonl line 1 is not JSON "),
    (b"\n\n", r" \[train\] is empty: it has no rows$"),
])  # fmt: skip
def test_a_bad_jsonl_file_is_named_with_the_line(tmp_path, text, message):
    path = tmp_path / "files" / "rows.jsonl"
    path.parent.mkdir()
    path.write_bytes(text)
    for source in (path, path.parent):
        with pytest.raises(UserError, match=rf"^data.path .*{message}"):
            read_rows(Source(str(source)))


def test_what_is_not_data_is_refused(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"not parquet")
    with pytest.raises(UserError, match=r"^data.eval_path .*rows.parquet cannot be read: .*Parquet"):
        read_rows(Source(str(tmp_path / "rows.parquet"), path_setting="data.eval_path"))
    (tmp_path / "rows.dat").write_text("prompt\na\n")
    with pytest.raises(UserError, match=r"rows.dat is neither JSONL, a JSON array, CSV nor parquet"):
        read_rows(Source(str(tmp_path / "rows.dat")))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match=r"nothing \(data.subset not set\) cannot be read: .*any data files"):
        read_rows(Source(str(tmp_path / "nothing")))
    saved = Path(make_saved(tmp_path))
    next(saved.glob("*.arrow")).write_bytes(b"cut")
    with pytest.raises(UserError, match=r"saved \(data.subset not set\) cannot be read: "):
        read_rows(Source(str(saved)))


def test_an_empty_data_set_is_refused(tmp_path):
    empty = Dataset.from_list(ROWS).select([])
    with pytest.raises(UserError, match=r"^data.path .*saved is empty, or has a split without rows"):
        read_rows(Source(save(tmp_path / "saved", empty)))
    empty.to_parquet(str(tmp_path / "rows.parquet"))
    with pytest.raises(UserError, match=r"^data.path .*rows.parquet \[train\] is empty: it has no rows$"):
        read_rows(Source(str(tmp_path / "rows.parquet")))


def test_a_subset_is_honoured_or_refused(tmp_path):
    with pytest.raises(UserError, match=r"^data.subset main: data.path .*rows.jsonl has no subsets: leave it out$"):
        read_rows(Source(make_jsonl(tmp_path), subset="main"))
    folder = make_jsonl_folder(tmp_path)
    with pytest.raises(UserError, match=r"\(data.subset main\) cannot be read: .*'main' not found"):
        read_rows(Source(folder, subset="main"))
    (Path(folder) / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: test.jsonl\n---\n"
    )
    assert read_rows(Source(folder, subset="main")) == [{"prompt": "t", "answer": 9}]


def test_sources_take_their_own_split_and_limit():
    config = DataConfig(path="a", subset="main", split="tr", limit=4, eval_limit=2)
    assert training_source(config) == Source("a", "tr", "main", 4)
    assert evaluation_source(config) is None
    same = evaluation_source(DataConfig(path="a", subset="main", eval_split="test", eval_limit=2))
    assert same == Source("a", "test", "main", 2, "data.path", "data.eval_split")
    other = evaluation_source(DataConfig(path="a", subset="main", eval_path="b", eval_limit=2))
    assert other == Source("b", None, None, 2, "data.eval_path", "data.eval_split")


@pytest.mark.parametrize("make", [*SOURCES, lambda _: ROWS, lambda _: Dataset.from_list(ROWS)])
def test_a_split_may_be_a_slice(make, tmp_path):
    path = make(tmp_path)
    assert read_rows(Source(path, "train[:60%]")) + read_rows(Source(path, "train[60%:]")) == ROWS
    assert read_rows(Source(path, "train[1:3]", limit=1)) == ROWS[1:2]
    assert read_rows(Source(path, "train[:1]+train[-20%:]")) == [ROWS[0], ROWS[4]]


@pytest.mark.parametrize("split, message", [
    ("train[:a]", r"^data.split train\[:a\] is not a slice of a split \(.*\): write one as in train\[:90%\]"),
    ("train[:200%]", r"^data.split train\[:200%\] is not a slice of a split \(Percent slice boundaries must be"),
    ("train[90%]", r"^data.split train\[90%\] is not a slice"),
    ("test[:50%]", r"^data.split test\[:50%\]: there is no such split, data.path .* has train: set data.split to"),
    ("train[9:]", r"^data.path .*rows.jsonl \[train\[9:\]\] is empty: it has no rows$"),
])  # fmt: skip
def test_a_slice_that_is_none_is_refused(tmp_path, split, message):
    with pytest.raises(UserError, match=message):
        read_rows(Source(make_jsonl(tmp_path), split))


def test_a_source_may_be_an_object(tmp_path):
    assert read_rows(Source(ROWS)) == read_rows(Source(Dataset.from_list(ROWS).with_format("torch"))) == ROWS
    assert read_rows(Source([{"prompt": "a"}, {"prompt": "b", "level": 2}]))[0] == {"prompt": "a", "level": None}
    splits = DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])})
    assert read_rows(Source(splits, "test")) == ROWS[:1]
    assert read_rows(training_source(DataConfig(path=ROWS, limit=2))) == ROWS[:2]
    for source, message in [
        (Source([]), r"^data.path a list \[train\] is empty: it has no rows$"),
        (Source(["a"]), r"^data.path: row 0 \(from 0\) is a str: give dicts$"),
        (Source([1]), r"^data.path: row 0 \(from 0\) is an int: give dicts$"),
        (Source(ROWS, "test"), r"^data.split test: there is no such split, data.path a list has train"),
        (Source(ROWS, subset="main"), r"^data.subset main: data.path a list has no subsets: leave it out$"),
    ]:
        with pytest.raises(UserError, match=message):
            read_rows(source)
