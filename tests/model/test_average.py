"""The moving average of the weights: its definition, on two ranks at every kind of sharding, and in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launching import make_task, ranks
from safetensors.torch import load_file
from workshop import Workshop

from hybrid_grpo.run.exporting import exported


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = make_task(tmp_path_factory.mktemp("task"))
    return folder, ranks(2, "averages", folder, programs="average_programs.py")


@pytest.mark.ranks
def test_on_two_ranks_it_is_what_the_definition_says(seen: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, both = seen
    for of_rank in both:
        for name, found in of_rank.items():
            # The definition is computed from the weights of the model, which in bfloat16 are rounded.
            assert found["error"] < (4e-3 if name == "bfloat16" else 1e-6), name
            assert found["moved"] > 1e-4, "a step moves a weight by about 1e-3"
            assert found["restored"], f"{name}: the weights are to the bit what they were before the average was used"
            assert found["resumed"], f"{name}: read from the files, the average goes on to the bit"
        of_other = [of_rank[name]["of stage 0"] for name in ("stage 0", "stage 2", "stage 3")]
        assert of_other[0] == of_other[1] == of_other[2], "a checkpoint of one stage is read at the others"
    exports = [load_file(folder / name / "model" / "model.safetensors") for name in ("stage 0", "stage 3", "adapters")]
    for name, weight in exports[0].items():
        # Adam divides by gradients near 0, which stages sum in other orders; a step is 1e-3.
        assert torch.allclose(weight, exports[1][name], atol=2e-5)
    assert any(not torch.equal(weight, exports[2][name]) for name, weight in exports[0].items())
    assert (folder / "adapters/model/adapter/adapter_model.safetensors").is_file()


@pytest.mark.process
def test_a_run_writes_it_beside_the_model_and_goes_on_with_it(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    command = ["sft", "--config=sft.yaml", "--policy.ema_decay=0.75"]

    def weights(folder: str) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / folder / "model.safetensors")

    def run(name: str, steps: int) -> None:
        done = shop.run(*command, f"--run.name={name}", f"--run.steps={steps}", "--run.resume=auto")
        assert done.status == 0, done.out + done.err

    run("parts", 1)
    start, model, average = map(weights, ("model", "runs/parts/model", "runs/parts/model_ema"))
    for name, weight in average.items():
        assert torch.allclose(weight, 0.75 * start[name] + 0.25 * model[name], atol=1e-6), name
    assert not all(torch.equal(weight, model[name]) for name, weight in average.items())
    run("parts", 2)
    run("whole", 2)
    parts, whole = map(weights, ("runs/parts/model_ema", "runs/whole/model_ema"))
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())
    assert exported(tmp_path / "runs/parts/model_ema")["step"] == 2
    shop.close()
