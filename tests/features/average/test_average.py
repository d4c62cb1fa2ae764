"""The moving average of the weights: its definition at every kind of sharding, and in a run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
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


class Steps(Stage):
    """Steps that add 10 to every weight; those that are skipped do not."""

    def __init__(self, own: Sharded) -> None:
        self.own, self.lr, self.frozen = own, 0.0, None
        self.engine = SimpleNamespace(engine=own, stage=own.stage)
        self.policy, self.meter, self.applied = cast(Any, self), Meter(), True
        average = Average(SftConfig(average=AverageConfig(decay=0.75)), None, None)
        average.load(self.policy)
        self.features = Features([average])

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

        def shows(expected: float, pad: float) -> None:
            before = [flat.clone() for flat in own.flats]
            with suppress(KeyError), feature.model.exports["model_ema"]():
                assert all(map(torch.equal, own.flats, own.split(weights(expected), pad - 1)))
                assert all(map(torch.equal, own.used if stage else own.flats, own.flats))
                for misused in (feature.model.update, feature.model.used().__enter__):
                    with pytest.raises(AssertionError):
                        misused()
                raise KeyError
            assert all(map(torch.equal, own.flats, before)), "as before the average was used, to the bit"

        for steps.applied in (True, False, True):
            steps.step_optimizer()
        shows(6.875, 6.875)
        feature.model.save(tmp_path)
        steps.step_optimizer()
        shows(12.65625, 12.65625)
        barrier()
        feature.model.load(tmp_path)
        shows(6.875, 12.65625)
        assert feature.model.checkpoint_bytes(3) == 12, "float32"

    in_ranks(world, program)


@pytest.mark.process
def test_a_run_writes_it_beside_the_model_and_goes_on_with_it(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
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
    shop.close()
