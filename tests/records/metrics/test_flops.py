"""The operations of a step, and what share of a device's peak they are."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hybrid_grpo.data.batch import Completion, Prompt, Rollout
from hybrid_grpo.distributed.hardware import peak_flops
from hybrid_grpo.model.flops import Cost
from hybrid_grpo.records.metrics import flops
from hybrid_grpo.records.metrics.meter import Meter

COST = Cost(body=1000.0, body_trained=1000.0, head=300.0, head_trained=300.0, width=8, layers={math.inf: 2})


def rollout_of(*completions: Completion) -> Rollout:
    return Rollout([Prompt(0, "?", [1] * 5, {})], list(completions), len(completions))


def stage_flops(rollout: Rollout, cost: Cost) -> tuple[float, float, float]:
    generate, read_P, train_P = flops.group_flops(rollout, cost)
    return generate, float(read_P.sum()), float(train_P.sum())


def test_the_stages_of_a_group_added_up_token_by_token():
    """Three tokens, and two behind each other with a tool's answer of four between; the prompt has five."""
    rollout = rollout_of(Completion([1] * 3, [], "stop"), Completion([1] * 2, [], "stop", given=((1, [7] * 4),)))
    attend = 2 * 8 * 2
    decoded = [range(6, 9), range(6, 12)]
    generate = 5 * (2000 + attend * 5) + sum(2000 + attend * n for tokens in decoded for n in tokens) + 5 * 600
    read = 5 * (2000 + attend * 5) + 3 * (2000 + attend * 8) + 6 * (2000 + attend * 11) + 5 * 600
    assert stage_flops(rollout, COST) == (generate, read, 3 * read)


def test_guests_are_not_sampled_and_what_is_not_learned_is_not_trained():
    own, guest = Completion([1] * 3, [], "stop"), Completion([1] * 3, [], "stop", writer="g", learned=False)
    both, alone = (stage_flops(rollout_of(*rows), COST) for rows in ((own, guest), (own,)))
    assert both == alone
    assert stage_flops(rollout_of(guest, guest), COST) == (0.0, 0.0, 0.0)


def measured(monkeypatch, dtype: str, times: dict[str, float], peak: float | None = 1e6) -> dict[str, float]:
    meter = Meter()
    for name, value in {"completion/sampled_tokens": 3, "policy/lr": 1e-6, **times}.items():
        meter.add(name, value)
    config = SimpleNamespace(dtype=dtype)
    policy = SimpleNamespace(cost=COST, config=config, engine=SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(flops, "_peak", lambda device: peak)
    numbers = flops.measure_flops(rollout_of(Completion([1] * 3, [], "stop")), 2, policy, meter)
    return {name: value for name, (value, _) in numbers.items()}


def test_utilization_is_operations_a_second_over_the_peak(monkeypatch):
    times = {"time/generate_s": 0.5, "time/train_s": 0.25}
    generate, read, train = stage_flops(rollout_of(Completion([1] * 3, [], "stop")), COST)
    numbers = measured(monkeypatch, "bfloat16", {**times, "time/reference_s": 0.1})
    assert numbers == pytest.approx(
        {
            "flops/generate": generate / 1e12,
            "flops/reference": read / 1e12,
            "flops/train": 2 * train / 1e12,
            "throughput/mfu_generate": generate / 0.5 / 1e6,
            "throughput/mfu_train": 2 * train / 0.25 / 1e6,
        }
    )
    assert measured(monkeypatch, "bfloat16", times, peak=None).keys() == {"flops/generate", "flops/train"}
    assert "throughput/mfu_train" not in measured(monkeypatch, "float32", times), "the peak is that of bfloat16"


def test_groups_that_were_left_out_count_and_steps_that_were_not_made_do_not(monkeypatch):
    """Twice as many tokens were sampled as are kept; the policy stood still in a step that was skipped."""
    times = {"time/generate_s": 0.5, "time/train_s": 0.25}
    usual = measured(monkeypatch, "float32", times)
    assert measured(monkeypatch, "float32", {**times, "completion/sampled_tokens": 6})["flops/generate"] == (
        2 * usual["flops/generate"]
    )
    assert "flops/train" not in measured(monkeypatch, "bfloat16", {"time/generate_s": 0.5, "policy/lr": 0.0})


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA L40S", 362),
        *(("NVIDIA GeForce RTX 3090", 71), ("NVIDIA GeForce RTX 5090", 210), ("NVIDIA A10G", 70)),
        ("NVIDIA B200", 2250),
        *((name, None) for name in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA H200 MIG 1g.18gb")),
        *((name, None) for name in ("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla T4")),
    ],
)
def test_the_peak_is_that_of_the_whole_device_by_its_name(name, tera):
    assert peak_flops(name) == (tera and tera * 1e12)


def test_what_is_given_counts_for_the_completion_that_is_given_it():
    """Two prompts of two completions: an answer to the last one is read behind its own prompt."""
    plain = Completion([1] * 2, [], "stop")
    rows = [plain, plain, plain, replace(plain, given=((1, [7] * 4),))]
    both = stage_flops(Rollout([Prompt(n, "?", [1] * (1 + 4 * n), {}) for n in range(2)], rows, 2), COST)
    alone = [
        stage_flops(Rollout([Prompt(0, "?", [1] * (1 + 4 * n), {})], rows[2 * n : 2 * n + 2], 2), COST)
        for n in range(2)
    ]
    assert both == pytest.approx([sum(stage) for stage in zip(*alone, strict=True)])
