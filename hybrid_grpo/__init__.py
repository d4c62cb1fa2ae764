"""hybrid_grpo: GRPO post-training inside one DeepSpeed engine.

The functions `train`, `sft`, `reward`, `evaluate`, `generate` and `publish` run the commands; see `commands/api.py`.
They are imported on first use, so that importing a subpackage imports nothing else.
"""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_grpo.commands.api import FinishedRun, evaluate, generate, publish, sft, train
    from hybrid_grpo.config.errors import UserError

__version__ = "0.1.0"
logging.getLogger("DeepSpeed").addFilter(
    # Every process would warn of the first, and every rank of the second: inference kernels, which are not used.
    lambda record: (
        not record.getMessage().startswith(("Setting accelerator to CPU", "No compatible DeepSpeed inference"))
    )
)
__all__ = ["FinishedRun", "UserError", "evaluate", "generate", "publish", "sft", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module hybrid_grpo has no attribute {name}")
    from hybrid_grpo.commands import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
