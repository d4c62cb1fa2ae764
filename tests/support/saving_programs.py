"""Program of tests/run/saving/test_writing.py: a checkpoint that is written while training continues, and the same one
written while it waits. See rank_programs.py."""

import time
from pathlib import Path
from typing import Any

from rank_programs import main
from reshaping_programs import AS_IF_LARGE, LORA, ROUND_ROBIN, build

from hybrid_grpo.distributed import tensor_files
from hybrid_grpo.run.saving.checkpoints import Checkpoints
from hybrid_grpo.run.saving.manifest import Manifest

LAYOUTS: dict[str, dict[str, Any]] = {
    "offloaded": {"stage": 3, "offload": True, "deepspeed": AS_IF_LARGE},
    "stage 2": {"stage": 2, "deepspeed": ROUND_ROBIN},
    "stage 1 in bfloat16": {"stage": 1, "dtype": "bfloat16"},
    "stage 0": {"stage": 0},
    "adapters": {"stage": 3, "lora": LORA},
}


def both(folder: Path) -> dict[str, Any]:
    """By layout: the files of a checkpoint of two steps and of the same one written beside the third step, and those
    of the third step."""
    copy = tensor_files.Postponed.copy

    def slow(self: Any) -> None:
        # The third step wants to change the tensors before they are copied.
        time.sleep(1.0)
        copy(self)

    tensor_files.Postponed.copy = slow  # type: ignore[method-assign]
    return {name: written(folder / name, build(folder, **settings)) for name, settings in LAYOUTS.items()}


def written(folder: Path, trainer: Any) -> list[dict[str, Any]]:
    alone, beside = (Checkpoints(folder / name, keep=9) for name in ("alone", "beside"))

    def saved() -> tuple[Any, ...]:
        state = {name: part.state_dict() for name, part in trainer.all_parts.items()}
        return trainer.policy.engine, trainer.done, {"policy": trainer.policy.state_dict(), **state}, trainer.shards

    for step in (1, 2, 3):
        trainer.step(step)
        trainer.done = step
        if step == 2:
            alone.save(*saved())
            assert beside.begin(*saved(), copy=True)
    beside.finish()
    alone.save(*saved())
    folders = [beside.folder / "step_000002", *(alone.folder / f"step_00000{step}" for step in (2, 3))]
    return [Manifest.read(path).files for path in folders]


if __name__ == "__main__":
    main(globals())
