import math
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybrid_grpo.records.metrics.catalogue import CATALOGUE, describe, duration, find
from hybrid_grpo.records.metrics.meter import Meter


def test_catalogue_has_one_entry_a_name_in_the_form_stage_what_reduction():
    names = [metric.name for metric in CATALOGUE]
    assert len(set(names)) == len(names)
    assert all(2 <= len(name.split("/")) <= 3 for name in names)
    assert all(metric.meaning.endswith(".") for metric in CATALOGUE)
    assert {metric.better for metric in CATALOGUE} == {"", "higher", "lower"}


def test_a_pattern_describes_the_names_it_matches_and_no_others():
    assert describe("eval/gsm8k-test/accuracy").name == "eval/gsm8k-test/accuracy"
    assert describe("reward/exact_match/mean").reduction == "mean"
    assert describe("reward/mean").meaning != describe("reward/exact_match/mean").meaning
    assert find("reward/a/b/mean") is None
    assert find("eval//accuracy") is None


def test_durations():
    assert [duration(seconds) for seconds in (4.24, 200, 7500)] == ["4.2 s", "3 min 20 s", "2 h 05 min"]


def test_an_unknown_name_is_refused():
    with pytest.raises(KeyError, match="policy/grad_nrom is not in the catalogue"):
        Meter().add("policy/grad_nrom", 1.0)


def test_reductions_on_one_rank():
    meter = Meter()
    for value, count in ((1.0, 3), (5.0, 1)):
        meter.add("reward/mean", value, count)
        meter.add("policy/loss", torch.tensor(value))
        meter.add("reward/max", value)
        meter.add("reward/min", value)
        meter.add("policy/lr", value)
        meter.add("time/train_s", value)
    meter.add("eval/b/accuracy", 0.25, 100)
    expected = {"reward/mean": 2.0, "policy/loss": 6.0, "reward/max": 5.0, "reward/min": 1.0, "policy/lr": 5.0}
    assert meter.reduce() == {**expected, "time/train_s": 6.0, "eval/b/accuracy": 0.25}
    assert meter.reduce() == {}, "reduce empties the meter"


def test_the_mean_of_nothing_leaves_no_trace():
    meter = Meter()
    meter.add("reward/mean", torch.tensor([]).mean(), 0)
    meter.add("reward/max", math.nan, 0)
    assert meter.reduce() == {}
    meter.add("reward/mean", math.nan, 0)
    meter.add("reward/mean", 0.5, 2)
    assert meter.reduce() == {"reward/mean": 0.5}


@pytest.mark.parametrize("name", ["reward/mean", "reward/max", "reward/min", "policy/lr", "policy/loss"])
def test_nan_is_shown_not_swallowed(name):
    meter = Meter()
    meter.add(name, 1.0)
    meter.add(name, math.nan)
    assert math.isnan(meter.reduce()[name])


def test_a_tensor_changed_after_it_was_added_does_not_change_the_metric():
    meter, loss = Meter(), torch.tensor(1.5)
    meter.add("policy/loss", loss)
    loss.zero_()
    assert meter.reduce() == {"policy/loss": 1.5}


def test_timer_adds_up_the_seconds_of_its_blocks():
    meter = Meter()
    for _ in range(2):
        with meter.time("time/generate_s"):
            time.sleep(0.02)
    assert 0.04 <= meter.reduce()["time/generate_s"] < 5


def _on_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    meter = Meter()
    meter.add("reward/mean", [0.5, 1.0][rank], [1, 3][rank])
    meter.add("policy/loss", [0.25, 0.5][rank])
    meter.add("reward/max", [-3.0, -2.0][rank])
    meter.add("reward/min", [-3.0, -2.0][rank])
    meter.add("policy/lr", 1e-4)
    meter.add("time/generate_s", [1.0, 3.0][rank])
    meter.add("policy/ratio_max", [1.0, math.nan][rank])
    if rank == 1:
        meter.add("reward/exact_match/mean", 0.75, 4)
        meter.add("completion/length_max", 7)
    values = meter.reduce()
    assert math.isnan(values.pop("policy/ratio_max"))
    expected = {"reward/mean": 0.875, "policy/loss": 0.75, "reward/max": -2.0, "reward/min": -3.0, "policy/lr": 1e-4}
    expected |= {"time/generate_s": 2.0, "reward/exact_match/mean": 0.75, "completion/length_max": 7.0}
    assert values == expected
    meter.add("policy/lr", [1e-4, 2e-4][rank])
    with pytest.raises(AssertionError, match="policy/lr differs between ranks"):
        meter.reduce()
    dist.destroy_process_group()
    (Path(folder) / f"done{rank}").touch()


@pytest.mark.process
def test_two_ranks_agree_though_one_has_metrics_the_other_lacks(tmp_path):
    mp.spawn(_on_rank, args=(str(tmp_path),), nprocs=2)
    assert (tmp_path / "done0").exists() and (tmp_path / "done1").exists()
