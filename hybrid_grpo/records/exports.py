"""Exports the trained model to a folder in Hugging Face format, completely or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_grpo.distributed.ranks import rank
from hybrid_grpo.records.files import replace_folder, replace_text, sync_tree
from hybrid_grpo.records.write_failures import WriteFailed, write_together

if TYPE_CHECKING:
    from hybrid_grpo.policy import Policy

FACTS = "run.json"
"""Name of the file in an exported folder with facts about the export, such as the step after which it was written."""


def export(policy: Policy, model: Path, facts: dict[str, float]) -> None:
    """Export the policy to the folder `model`, completely or not at all, with `facts` about it, such as its step.
    Raise WriteFailed on all ranks if any rank cannot write. Collective."""
    folder = model.parent
    draft, old = (folder / f".{model.name}_{kind}" for kind in ("draft", "old"))

    def clear() -> None:
        for rest in (draft, old) if rank() == 0 else ():
            shutil.rmtree(rest, ignore_errors=True)

    def publish() -> None:
        if rank() == 0:
            replace_text(draft / FACTS, json.dumps(facts) + "\n")
            sync_tree(draft)
            replace_folder(model, draft, old)
            clear()

    try:
        write_together(clear, folder)
        # Each library that writes here has errors of its own.
        write_together(lambda: policy.export(draft), folder, (Exception,))
        write_together(publish, folder)
    except WriteFailed:
        clear()
        raise


def is_finished(run: Path) -> bool:
    """Return whether a run in its folder has its model, of the step of its newest checkpoint if it has any."""
    tags = (path.name.removeprefix("step_") for path in run.glob("checkpoints/step_*"))
    return exported(run / "model").get("step", -1) >= max((int(tag) for tag in tags if tag.isdecimal()), default=0)


def exported(model: Path) -> dict[str, float]:
    """Return the facts about the export in the folder `model`; empty if it is missing or another program wrote it."""
    try:
        facts = json.loads((model / FACTS).read_bytes())
        return {name: float(value) for name, value in facts.items()} | {"step": int(facts["step"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
