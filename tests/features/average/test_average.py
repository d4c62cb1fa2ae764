"""The moving average of the weights: its definition, on two ranks at every kind of sharding, and in a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from launching import ranks
from safetensors.torch import load_file
from workshop import Workshop

from hybrid_grpo.records.exports import exported

PROGRAMS = str(Path(__file__).with_name("programs.py"))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    shop = Workshop(tmp_path_factory.mktemp("shop"))
    yield shop
    shop.close()


@pytest.mark.ranks
def test_on_two_ranks_it_is_what_the_definition_says(shop: Workshop) -> None:
    folder = shop.folder
    for of_rank in ranks(2, "averages", folder, programs=PROGRAMS):
        for name, found in of_rank.items():
            # The definition is computed from the weights of the model, which in bfloat16 are rounded.
            assert found["error"] < (4e-3 if name == "bfloat16" else 1e-6), name
            assert found["moved"] > 1e-4, "a step moves a weight by about 1e-3"
            assert found["restored"], f"{name}: the weights are to the bit what they were before the average was used"
            assert found["resumed"], f"{name}: read from the files, the average goes on to the bit"
        for name in ("stage 2", "stage 3"):
            # Small weights that DeepSpeed keeps whole beside their shards were those of the last step.
            for ours, theirs in zip(of_rank[name]["said"], of_rank["stage 0"]["said"], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-3), name
            inside, outside = of_rank[name]["said"]
            assert inside != pytest.approx(outside, abs=1e-2), "the average is another model than the last step's"
        of_other = [of_rank[name]["of stage 0"] for name in ("stage 0", "stage 2", "stage 3")]
        assert of_other[0] == of_other[1] == of_other[2], "a checkpoint of one stage is read at the others"
    exports = [load_file(folder / name / "model" / "model.safetensors") for name in ("stage 0", "stage 3", "adapters")]
    for name, weight in exports[0].items():
        # Adam divides by gradients near 0, which stages sum in other orders; a step is 1e-3.
        assert torch.allclose(weight, exports[1][name], atol=2e-5)
    assert any(not torch.equal(weight, exports[2][name]) for name, weight in exports[0].items())
    assert (folder / "adapters/model/adapter/adapter_model.safetensors").is_file()


@pytest.mark.process
def test_a_run_writes_it_beside_the_model_and_goes_on_with_it(shop: Workshop) -> None:
    run = shop.folder / "runs" / "averaged"

    def weights(folder: Path) -> dict[str, torch.Tensor]:
        return load_file(folder / "model.safetensors")

    before = weights(shop.folder / "model")
    for steps in (1, 2):
        command = ["sft", "--config=sft.yaml", "--average.decay=0.75", "--run.name=averaged"]
        done = shop.run(*command, f"--run.steps={steps}", "--run.resume=auto")
        assert done.status == 0, done.out + done.err
        model, average = weights(run / "model"), weights(run / "model_ema")
        for name, weight in average.items():
            assert torch.allclose(weight, 0.75 * before[name] + 0.25 * model[name], atol=1e-6), name
        assert not any(torch.allclose(weight, model[name], atol=1e-4) for name, weight in average.items())
        assert exported(run / "model_ema")["step"] == steps
        before = average
