"""What details.jsonl says of a step, and that it is what happened."""

import json
from statistics import fmean

import pytest

from hybrid_grpo.records.files import cut_lines
from hybrid_grpo.records.json_lines import read_jsonl
from hybrid_grpo.records.metrics.meter import stages_of


def test_a_trace_is_the_stages_within_a_step():
    spans = [("early", 1.0, 2.0), ("generate", 5.0, 6.5), ("step", 5.0, 8.0)]
    assert stages_of(spans) == [["generate", 0.0, 1.5]] and stages_of(()) is None


@pytest.mark.parametrize("text, step, kept", [
    ('{"step":1,"a":2}\n{"step": 2}\n{"step":10}\n', 2, 2),
    ('{"step":1}\n{"step":2,"sta', 2, 1),
    ('{"step":1}\n\x00\x00\x00\n{"step":2}\n', 5, 1),
    ('{"step":1}\n', -1, 0),
    ("", 3, 0),
])  # fmt: skip
def test_lines_behind_a_step_are_cut(tmp_path, text, step, kept):
    path = tmp_path / "details.jsonl"
    path.write_text(text)
    cut_lines(path, step)
    assert path.read_text().splitlines() == text.splitlines()[:kept]
    cut_lines(tmp_path / "missing", step)


@pytest.mark.ranks
def test_the_details_of_a_run_are_what_happened(whole_run):
    """Against what the run has written of the same steps elsewhere, its metrics."""
    lines = read_jsonl(whole_run.folder / "details.jsonl")
    numbers = {line["step"]: line for line in read_jsonl(whole_run.folder / "metrics.jsonl")}
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        metrics = numbers[line["step"]]
        stages = [{name: end - begin for name, begin, end in of_rank} for of_rank in line["stages"]]
        slack = 0.002
        for metric, names in (
            ("time/generate_s", ("generate", "wait")),
            ("time/straggler_s", ("wait",)),
            ("time/switch_s", ("gather", "release")),
            ("time/train_s", ("train",)),
        ):
            assert fmean(sum(of[name] for name in names) for of in stages) == pytest.approx(metrics[metric], abs=slack)
        for of_rank in line["stages"]:
            begins = [begin for _, begin, _ in of_rank]
            assert begins == sorted(begins) and begins[0] >= 0
        assert len(json.dumps(line)) < 10_000
