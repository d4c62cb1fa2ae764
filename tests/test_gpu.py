"""What only a GPU can show; the same programs as on the CPU."""

import pytest
import torch
from launching import make_task, ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


def test_steps_in_float32_agree_with_the_cpu(folder):
    (gpu,) = ranks(1, "zero3", folder, accelerator="cuda")
    (cpu,) = ranks(1, "zero3", folder)
    assert [row[:2] for row in gpu["rollouts"][0]] == [row[:2] for row in cpu["rollouts"][0]]
    assert gpu["metrics"][0]["policy/grad_norm"] == pytest.approx(cpu["metrics"][0]["policy/grad_norm"], rel=1e-3)
    assert gpu["metrics"][0]["parity/logp_abs_diff_max"] < 1e-3
    assert gpu["metrics"][0]["memory/peak_gb"] > 0


def test_the_reference_and_the_export(folder):
    (seen,) = ranks(1, "export", folder, accelerator="cuda")
    assert seen["reference"] < 1e-5 and seen["exported"] and seen["trained"] and seen["tied"]


def test_bfloat16_and_offloading_to_the_host(folder):
    (seen,) = ranks(1, "variants", folder, accelerator="cuda")
    for name in seen.keys() - {"checkpointing"}:
        assert seen[name]["policy/skipped_steps"] == 0
        assert 0 < seen[name]["parity/logp_abs_diff_mean"] < 0.02, name
