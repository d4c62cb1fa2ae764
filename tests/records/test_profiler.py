"""What a traced step leaves behind."""

import gzip
import json

import pytest
import torch
from torch.profiler import record_function

from hybrid_grpo.records.json_lines import read_jsonl
from hybrid_grpo.records.metrics.meter import Meter
from hybrid_grpo.records.profiler import STAGE, Profiler


def test_stages_and_operations_of_a_step_are_told(tmp_path):
    meter, profiler, a = Meter(), Profiler([3], tmp_path / "profile"), torch.ones(128, 128, requires_grad=True)
    for step in (2, 3):
        with profiler.step(step, meter):
            with meter.time("time/reward_wait_s"):
                a.detach().cumsum(0)
            with meter.time("time/train_s"):
                for _ in range(2):
                    (a @ a).sum().backward()
                    with record_function(f"{STAGE}optimizer"):
                        torch.bmm(a.detach()[None], a.detach()[None])
                a.detach().sort()
            a.detach().cumprod(0)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "step_000003.txt",
        "step_000003_rank0.json.gz",
    ]
    text = (tmp_path / "profile" / "step_000003.txt").read_text()
    calls = {line.split()[0]: int(line.split()[-1]) for line in text.splitlines() if "::" in line or STAGE in line}
    # Forward and backward of the product.
    assert calls["aten::mm"] == 2 * 3 and calls["aten::bmm"] == calls[f"{STAGE}optimizer"] == 2
    assert calls["aten::sort"] == calls["aten::cumsum"] == calls["aten::cumprod"] == 1
    assert {f"{STAGE}whole", f"{STAGE}reward_wait", f"{STAGE}train"} <= calls.keys()
    assert meter.reduce()["time/profiled"] == 1


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path, capfd):
    (tmp_path / "profile").write_text("")
    with Profiler([1], tmp_path / "profile").step(1, Meter()):
        pass
    assert "WARNING: the profile of step 1 was not written" in capfd.readouterr().err


@pytest.mark.ranks
def test_a_step_of_a_run_is_traced_on_every_rank(whole_run):
    folder = whole_run.folder / "profile"
    traces = sorted(folder.glob("*.gz"))
    assert [path.name for path in traces] == [f"step_000004_rank{rank}.json.gz" for rank in (0, 1)]
    for path in traces:
        with gzip.open(path) as file:
            names = {event["name"] for event in json.load(file)["traceEvents"] if "name" in event}
        assert {f"stage/{stage}" for stage in ("generate", "reward_wait", "reference", "train", "optimizer")} <= names
    text = (folder / "step_000004.txt").read_text()
    assert all(f"{STAGE}{stage} " in text for stage in ("generate", "reference", "train", "optimizer"))
    lines = read_jsonl(whole_run.folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "time/profiled" in line] == [4]
