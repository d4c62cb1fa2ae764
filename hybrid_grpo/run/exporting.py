"""The trained model as a folder in Hugging Face format, which is whole or absent."""

import json
import shutil
from pathlib import Path

from hybrid_grpo.distributed import rank
from hybrid_grpo.policy import TrainedModel
from hybrid_grpo.run.files import replace_text, sync, sync_tree
from hybrid_grpo.run.writing import WriteFailed, write_together

_STEP = "run.json"
"""File of `model/` that tells which step it is of."""


def export(policy: TrainedModel, folder: Path, step: int) -> None:
    """Write `folder/model`, of a step, whole or not at all. Raises WriteFailed on all ranks. Collective."""
    draft, old, model = folder / ".model_draft", folder / ".model_old", folder / "model"

    def clear() -> None:
        for rest in (draft, old) if rank() == 0 else ():
            shutil.rmtree(rest, ignore_errors=True)

    def publish() -> None:
        if rank() == 0:
            replace_text(draft / _STEP, json.dumps({"step": step}) + "\n")
            sync_tree(draft)
            if model.exists():
                model.rename(old)
            draft.rename(model)
            sync(folder)
            clear()

    try:
        write_together(clear, folder)
        # Each of the libraries that write here has errors of its own.
        write_together(lambda: policy.export(draft), folder, (Exception,))
        write_together(publish, folder)
    except WriteFailed:
        clear()
        raise


def exported_step(folder: Path) -> int | None:
    """The step whose weights `folder/model` has; None where there is none, or another program wrote it."""
    try:
        return int(json.loads((folder / "model" / _STEP).read_bytes())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
