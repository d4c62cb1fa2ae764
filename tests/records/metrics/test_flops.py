"""The operations of a step, and what share of a device's peak they are."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hybrid_grpo.data.batch import Completion, Prompt, Rollout
from hybrid_grpo.distributed.hardware import peak_flops
from hybrid_grpo.model.flops import Cost
from hybrid_grpo.records.metrics import measurements
from hybrid_grpo.records.metrics.meter import Meter

COST = Cost(body=1000.0, body_trained=1000.0, head=300.0, head_trained=300.0, width=8, layers={math.inf: 2})


def rollout_of(*completions: Completion) -> Rollout:
    return Rollout([Prompt(0, "?", [1] * 5, {})], list(completions), len(completions))


def by_token(rollout: Rollout) -> tuple[float, list[float], list[float]]:
    """What `group_flops` returns, one token after the other."""
    generated, read = 0.0, []
    for group, prompt in enumerate(rollout.prompts):
        size = len(prompt.token_ids)
        rows = rollout.completions[group * rollout.num_generations :][: rollout.num_generations]

        def token(seen: int) -> float:
            return 2 * COST.body + 2 * 2 * COST.width * seen

        generated += any(not row.writer for row in rows) * size * token(size)
        read.append(any(row.learned for row in rows) * size * token(size))
        for row in rows:
            tokens, heads = (
                len(row.token_ids) + sum(len(ids) for _, ids in row.observations),
                2 * COST.head * len(row.token_ids),
            )
            generated += (not row.writer) * (sum(token(size + n) for n in range(1, tokens + 1)) + heads)
            read[-1] += row.learned * (tokens * token(size + tokens) + heads)
    return generated, read, [3 * forward for forward in read]


def test_a_step_costs_what_its_tokens_cost_one_after_the_other():
    """With prompts of two lengths, an answer of a tool, guests, and what is not learned: a guest is not sampled, and
    what is given counts for the completion that is given it, behind its own prompt."""
    plain, guest = Completion([1] * 3, [], "stop"), Completion([1] * 4, [], "stop", writer="g", learned=False)
    answered = replace(plain, token_ids=[1] * 2, observations=((1, [7] * 4),))
    rows = [plain, answered, plain, guest, replace(guest, learned=True), replace(plain, learned=False), guest, guest]
    rollout = Rollout([Prompt(n, "?", [1] * (5 + 4 * n), {}) for n in range(4)], rows, 2)
    for counted, expected in zip(measurements.group_flops(rollout, COST), by_token(rollout), strict=True):
        assert counted == pytest.approx(expected)


def measured(monkeypatch, dtype: str, times: dict[str, float], gpu: str = "NVIDIA H200") -> dict[str, float]:
    meter = Meter()
    for name, value in {"completion/sampled_tokens": 3, "policy/lr": 1e-6, **times}.items():
        meter.add(name, value)
    engine = SimpleNamespace(device=torch.device("cuda"))
    policy = SimpleNamespace(cost=COST, config=SimpleNamespace(dtype=dtype), engine=engine)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    numbers = measurements.measure_flops(rollout_of(Completion([1] * 3, [], "stop")), 2, policy, meter)
    return {name: value for name, (value, _) in numbers.items()}


def test_utilization_is_operations_a_second_over_the_peak(monkeypatch):
    times = {"time/generate_s": 0.5, "time/train_s": 0.25}
    generate, [read], [train] = by_token(rollout_of(Completion([1] * 3, [], "stop")))
    numbers = measured(monkeypatch, "bfloat16", {**times, "time/reference_s": 0.1})
    assert numbers == pytest.approx(
        {
            "flops/generate": generate / 1e12,
            "flops/reference": read / 1e12,
            "flops/train": 2 * train / 1e12,
            "throughput/mfu_generate": generate / 0.5 / 989e12,
            "throughput/mfu_train": 2 * train / 0.25 / 989e12,
        }
    )
    assert measured(monkeypatch, "bfloat16", times, gpu="Tesla T4").keys() == {"flops/generate", "flops/train"}
    assert "throughput/mfu_train" not in measured(monkeypatch, "float32", times), "the peak is that of bfloat16"


def test_groups_that_were_left_out_count_and_steps_that_were_not_made_do_not(monkeypatch):
    """Twice as many tokens were sampled as are kept; the policy stood still in a step that was skipped."""
    times = {"time/generate_s": 0.5, "time/train_s": 0.25}
    usual = measured(monkeypatch, "float32", times)
    assert measured(monkeypatch, "float32", {**times, "completion/sampled_tokens": 6})["flops/generate"] == (
        2 * usual["flops/generate"]
    )
    assert "flops/train" not in measured(monkeypatch, "bfloat16", {"time/generate_s": 0.5, "policy/lr": 0.0})


@pytest.mark.parametrize("name, tera", [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-40GB", 312),
    ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA L40S", 362),
    *(("NVIDIA GeForce RTX 3090", 71), ("NVIDIA GeForce RTX 5090", 210), ("NVIDIA A10G", 70)), ("NVIDIA B200", 2250),
    *((name, None) for name in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA H200 MIG 1g.18gb")),
    *((name, None) for name in ("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla T4")),
])  # fmt: skip
def test_the_peak_is_that_of_the_whole_device_by_its_name(name, tera):
    assert peak_flops(name) == (tera and tera * 1e12)
