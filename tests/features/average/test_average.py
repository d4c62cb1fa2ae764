"""The moving average of the weights: its definition, on two ranks at every kind of sharding, and in a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from launching import ranks
from rank_threads import in_ranks
from safetensors.torch import load_file
from workshop import Workshop
from zero_layouts import Sharded, weights

from hybrid_grpo.config import SftConfig
from hybrid_grpo.distributed.ranks import barrier
from hybrid_grpo.engine import StepResult
from hybrid_grpo.features.average.average import Average
from hybrid_grpo.features.average.settings import AverageConfig
from hybrid_grpo.records.exports import exported
from hybrid_grpo.records.metrics.meter import Meter
from hybrid_grpo.run.feature import Features
from hybrid_grpo.run.stage import Stage

PROGRAMS = str(Path(__file__).with_name("programs.py"))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    shop = Workshop(tmp_path_factory.mktemp("shop"))
    yield shop
    shop.close()


class Steps(Stage):
    """Steps that add 10 to every weight; those that are skipped do not. `followed` has what the weights were each time
    that others took them over."""

    def __init__(self, own: Sharded) -> None:
        self.own, self.lr, self.frozen, self.followed = own, 0.0, None, list[torch.Tensor]()
        self.engine = SimpleNamespace(engine=own, stage=own.stage)
        self.policy, self.meter, self.applied = cast(Any, self), Meter(), True
        average = Average(SftConfig(average=AverageConfig(decay=0.75)), None, None)
        average.load(self.policy)
        self.features = Features([average])

    def follow(self) -> None:
        self.followed.append(self.own.flats[0].clone())

    def step(self, step: int = 0) -> Any:
        for flat in self.own.flats if self.applied else ():
            flat += 10
        return StepResult(1.0, self.applied)


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 0), (2, 1), (3, 2), (2, 3), (3, 3)])
def test_it_is_what_the_definition_says_however_the_weights_are_laid_out(
    tmp_path: Path, world: int, stage: int
) -> None:
    """With weights w, w + 10 and w + 20, the average at 0.75 is w + 2.5 and then w + 6.875; a skipped step is none."""

    def program(_: int) -> None:
        steps = Steps(own := Sharded(stage, weights(0)))
        [feature] = cast(list[Average], list(steps.features))

        def shows(expected: float) -> None:
            before = [flat.clone() for flat in own.flats]
            with suppress(KeyError), feature.exports["model_ema"]():
                found = own.joined(own.flats)
                assert all(map(torch.equal, found.values(), weights(expected).values())), found
                assert all(map(torch.equal, own.used if stage else own.flats, own.flats))
                assert torch.equal(steps.followed.pop(), own.flats[0])
                for misused in (feature.average.update, feature.average.used().__enter__):
                    with pytest.raises(AssertionError):
                        misused()
                raise KeyError
            assert all(map(torch.equal, own.flats, before)), "as before the average was used, to the bit"

        for steps.applied in (True, False, True):
            steps.step_optimizer()
        shows(6.875)
        with feature.exports["model_ema"]():
            steps.followed.clear()
        assert torch.equal(steps.followed.pop(), own.flats[0])
        feature.average.save(tmp_path)
        steps.step_optimizer()
        shows(12.65625)
        barrier()
        feature.average.load(tmp_path)
        shows(6.875)
        assert feature.checkpoint_bytes(3) == 12, "float32"

    in_ranks(world, program)


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
