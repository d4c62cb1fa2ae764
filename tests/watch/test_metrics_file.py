import json

import pytest

from hybrid_grpo.records.sinks import JsonlSink
from hybrid_grpo.records.trackers import growing_files
from hybrid_grpo.watch import metrics_file
from hybrid_grpo.watch.metrics_file import MetricsFile, first_step, last_row, read_step


def line(step, **values):
    return json.dumps({"step": step, **values}) + "\n"


def steps(file):
    return file.table.column("step").tolist()


def test_lines_are_read_as_they_come_and_an_unfinished_one_is_left(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert not file.read(1)  # the run has not begun
    path.write_text(line(0, a=1) + line(1, a=2)[:9])
    assert file.read(1)
    assert (steps(file), file.damaged) == ([0], 0)
    assert not file.read(1)
    with path.open("a") as run:
        run.write(line(1, a=2)[9:] + line(2, a=None))
    assert file.read(1)
    assert steps(file) == [0, 1, 2]
    assert [str(value) for value in file.table.column("a")] == ["1.0", "2.0", "nan"]
    assert (last_row(path) or {})["step"] == 2


def test_a_resumed_run_cuts_its_lines_and_goes_on(tmp_path):
    """Steps 3 and 4 are made again with other numbers. The file is longer than before when it is looked at again."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    sink = JsonlSink(path)
    for step in range(5):
        sink.write(step, {"a": step})
    sink.close()
    file.read(1)
    assert file.table.column("a").tolist() == [0, 1, 2, 3, 4]
    sink = JsonlSink(path, done=2)
    for step in range(3, 9):
        sink.write(step, {"a": 10 * step})
    sink.close()
    assert file.read(1)
    assert file.table.column("a").tolist() == [0, 1, 2, 30, 40, 50, 60, 70, 80]
    path.unlink()
    assert file.read(1)
    assert file.table.rows == 0


def test_lines_that_are_no_steps_are_counted_and_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    bad = ['{"step": 1, "a": "text"}', "[1]", '{"a": 1}', '{"step": 0}', "\x00\xff", "[" * 10_000, '{"step": 1.5}']
    path.write_bytes(line(0, a=1).encode() + "".join(f"{text}\n" for text in bad).encode("latin1") + line(2).encode())
    file = MetricsFile(path)
    file.read(1)
    assert (steps(file), file.damaged) == ([0, 2], len(bad))


def test_nan_and_infinity_are_no_values(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "a": NaN, "b": -Infinity, "c": 1}\n')
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.read(1)
    assert [str(file.table.column(name)[0]) for name in "abc"] == ["nan", "nan", "1.0"]


def test_a_large_file_is_looked_at_all_over_first_and_read_bit_by_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_file, "_GLIMPSE_OVER", 10_000)
    monkeypatch.setattr(growing_files, "_CHUNK", 5_000)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step, a=step / 7) for step in range(20_000)))
    file = MetricsFile(path)
    assert file.read(0)
    seen = file.shown.column("step")
    assert (seen[0], seen[-1]) == (0, 19_999)
    assert 300 < len(seen) <= 401
    assert max(seen[1:] - seen[:-1]) < 200, "lines from all over the file"
    assert file.share_read < 0.1
    turns = 0
    while file.share_read < 1:
        assert file.read(0) == (file.share_read == 1), "nothing else is shown until everything has been read"
        turns += 1
    assert turns > 50
    assert file.shown is file.table
    assert file.table.column("a").tolist() == pytest.approx([step / 7 for step in range(20_000)], rel=5e-7)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\x00" * 100, b'{"step": 1'])
def test_a_file_without_a_step_has_no_last_row(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    assert last_row(tmp_path / "metrics.jsonl") is None
    assert last_row(tmp_path / "none.jsonl") is None


def test_any_trace_is_found_without_reading_the_others(tmp_path):
    """Also among damaged lines, and the one before where a step has none."""
    path = tmp_path / "details.jsonl"
    there = [step for step in range(2, 300) if step % 10]
    text = "".join(line(step, words="x" * (step % 7 * 50)) + ("damaged\n" if step % 4 else "") for step in there)
    path.write_text(text + line(300)[:9])
    for step in range(310):
        wanted = max((other for other in there if other <= step), default=None)
        found = read_step(path, step)
        assert (found and found["step"]) == wanted
    newest = read_step(path, None)
    assert (newest["step"], newest["words"], first_step(path)) == (299, "x" * 250, 2)
    gone = tmp_path / "gone.jsonl"
    assert (read_step(gone, 1), read_step(gone, None), first_step(gone)) == (None, None, None)
