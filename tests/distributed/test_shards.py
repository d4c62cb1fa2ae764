"""Files of a checkpoint, without an engine; tests/run/test_reshaping.py has the layouts that DeepSpeed makes."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_threads import in_ranks
from torch import Tensor, nn
from zero_layouts import Sharded, weights

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed import shards
from hybrid_grpo.distributed.ranks import all_gather_objects
from hybrid_grpo.engine import OffloadedModel

POLICY = "policy_00000_of_00001.pt"


def trained(width: int = 3, steps: int = 2) -> tuple[nn.Module, torch.optim.AdamW]:
    """A module of which one layer is frozen and one is used from the second step on."""
    torch.manual_seed(0)
    module = nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in ("first", "late", "frozen")})
    module["frozen"].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        train(module, optimizer, late=step > 0)
    return module, optimizer


def train(module: nn.Module, optimizer: torch.optim.AdamW, late: bool = True) -> None:
    used = [module["first"].weight, *([module["late"].weight] if late else [])]
    optimizer.zero_grad()
    sum(weight.sin().sum() for weight in used).backward()
    optimizer.step()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_training_goes_on_from_the_files_to_the_bit(tmp_path: Path, steps: int) -> None:
    module, optimizer = trained(steps=steps)
    shards.save_optimizer(tmp_path, module, optimizer, stage=0)
    again, its_optimizer = trained(steps=3)
    shards.load_optimizer(tmp_path, again, its_optimizer, stage=0)
    for one in ((module, optimizer), (again, its_optimizer)):
        train(*one)
    for name in ("first", "late"):
        assert torch.equal(again[name].weight, module[name].weight), name
        assert its_optimizer.state[again[name].weight]["step"] == optimizer.state[module[name].weight]["step"]
    content = torch.load(tmp_path / POLICY, weights_only=True)
    assert content["shapes"].keys() == {"first.weight", "late.weight"}, "frozen weights come with the model"


LAYOUTS = [(1, 0), (2, 0), (1, 3), (2, 3), (3, 3), (2, 1), (3, 2)]


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("resumed", LAYOUTS)
def test_weights_and_moments_are_read_on_any_ranks_and_at_any_stage(
    tmp_path: Path, saved: tuple, resumed: tuple
) -> None:
    """Of whatever padding one layout has, nothing reaches the other; and what the model computes with follows."""

    def save(_: int) -> None:
        own = Sharded(saved[1], weights(1), pad=float("nan"))
        moments = own.split(weights(9), float("nan"))
        for key, moment in zip(own.keys, moments, strict=True):
            own.inner.state[key] = {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": 2 * moment}
        shards.save_optimizer(tmp_path, own.module, own.optimizer, own.stage)

    def load(_: int) -> None:
        own = Sharded(resumed[1], weights(0), pad=-1.0)
        shards.load_optimizer(tmp_path, own.module, own.optimizer, own.stage)
        assert own.told == {0: [], 3: ["prologue", 0, 1, "partition", "epilogue"]}.get(own.stage, [0, 1])
        states = [own.inner.state[key] for key in own.keys]
        assert {float(state["step"]) for state in states} == {3.0}
        first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        for found, start, pad, times in (
            *((flats, 1, -1.0, 1) for flats in (own.flats, own.used if own.stage else own.flats)),
            *((first, 9, 0.0, 1), (second, 9, 0.0, 2)),
        ):
            for mine, expected in zip(found, own.split(weights(start), pad / times), strict=True):
                assert torch.equal(mine, times * expected)

    in_ranks(saved[0], save)
    in_ranks(resumed[0], load)


class Reference(OffloadedModel):
    """A frozen model of these weights, without DeepSpeed."""

    def __init__(self, whole: dict[str, Tensor], dtype: torch.dtype) -> None:
        own = Sharded(3, whole)
        del own.module["frozen"]
        for parameter in own.module.parameters():
            count = parameter.ds_tensor.numel()
            parameter.ds_tensor = parameter.ds_tensor.to(dtype)
            parameter.ds_tensor.ds_numel = count
        self.engine, self._averages, self.released = own, {}, 0
        own.optimizer.empty_partition_cache = lambda: setattr(self, "released", self.released + 1)

    def whole(self, averages: bool) -> Iterator[Tensor]:
        for name, parameter in self.engine.module.named_parameters():
            shard = self._averages[name] if averages else parameter.ds_tensor
            yield torch.cat(all_gather_objects(shard[: parameter.ds_numel]))[: parameter.ds_numel]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("worlds", "stage"), [((1, 2), 3), ((2, 3), 2), ((3, 1), 3)])
def test_a_reference_moves_in_small_steps_and_goes_on_from_its_files_on_any_ranks(
    tmp_path: Path, dtype: torch.dtype, worlds: tuple[int, int], stage: int
) -> None:
    """Each step was rounded to bfloat16, in which 1 % of a difference of 5 % is nothing: the average never moved."""
    start = {name: of + 1 for name, of in weights(0).items()}
    goal = {name: 1.05 * of.to(dtype).float() for name, of in start.items()}

    def go(steps: int, file: str, _: int) -> list[Tensor]:
        reference, policy = Reference(start, dtype), SimpleNamespace(engine=Sharded(stage, goal), stage=stage)
        if file:
            reference.load(tmp_path)
        for _ in range(steps):
            reference.blend(policy, 0.01)
        if not file:  # another rank may still read what this one would overwrite
            reference.save(tmp_path)
        assert reference.released == steps + bool(file), "no small weight stays gathered"
        found = list(reference.whole(dtype != torch.float32))
        assert all(map(torch.equal, reference.whole(False), (of.to(dtype) for of in found)))
        reference.blend(policy, 1.0)
        assert not reference._averages, "a copy"
        assert all(map(torch.equal, reference.whole(False), (of.to(dtype).flatten() for of in goal.values())))
        return found

    whole = in_ranks(worlds[0], partial(go, 300, ""))[0]
    in_ranks(worlds[0], partial(go, 150, ""))
    again = in_ranks(worlds[1], partial(go, 150, "saved"))[0]
    for average, other, begin, end in zip(whole, again, start.values(), goal.values(), strict=True):
        begin, way = begin.to(dtype).float().flatten(), 1 - 0.99**300
        torch.testing.assert_close(average, begin + way * (end.flatten() - begin), rtol=1e-5, atol=1e-5)
        assert torch.equal(average, other)


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (None, "cpu")])
def test_a_fused_optimizer_counts_its_steps_where_its_weights_are(tmp_path: Path, fused: bool, device: str) -> None:
    """Its kernel reads the count from the device; a count on the host would be an address that is not the GPU's."""
    shards.save_optimizer(tmp_path, *trained(), stage=0)
    module = trained(steps=0)[0].to("meta")
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], fused=fused)
    shards.load_optimizer(tmp_path, module, optimizer, stage=0)
    assert [state["step"].device.type for state in optimizer.state.values()] == [device] * 2
    if fused is None:
        assert [state["step"].item() for state in optimizer.state.values()] == [2, 1]


def test_what_belongs_to_another_model_is_refused(tmp_path: Path) -> None:
    shards.save_optimizer(tmp_path, *trained(width=4), stage=0)
    with pytest.raises(UserError, match=r"another model .* shape of first.weight is \[4, 4\], here it is \[3, 3\]"):
        shards.load_optimizer(tmp_path, *trained(), stage=0)


class Malice:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (os.environ["MALICE"],)


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALICE", str(tmp_path / "done"))
    for name, load in (
        (POLICY, lambda: shards.load_optimizer(tmp_path, *trained(), stage=0)),
        ("state_00000_of_00001.pt", lambda: shards.load_state(tmp_path)),
    ):
        torch.save({"shapes": {}, "flats": Malice()}, tmp_path / name)
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            load()
    assert not (tmp_path / "done").exists()


def test_a_state_holds_plain_values_and_tensors(tmp_path: Path) -> None:
    state = {"seed": 3, "name": "a", "left": [True, None], "recent": torch.ones(2, 2)}
    (tmp_path / "two").mkdir()
    shards.save_state(tmp_path, state)
    loaded = shards.load_state(tmp_path)
    assert torch.equal(loaded.pop("recent"), state.pop("recent")) and loaded == state
    in_ranks(2, lambda rank: shards.save_state(tmp_path / "two", {"rank": rank}))
    for world, found in ((2, [0, 1]), (3, [0, 0, 0])):
        states = in_ranks(world, lambda _: shards.load_state(tmp_path / "two"))
        assert [state["rank"] for state in states] == found, "a rank's own, where there are as many"
