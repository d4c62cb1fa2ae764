"""What a forward's experts are given, seen from outside: by hooks on the modules that compute them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


@contextmanager
def experts_used(model: Any) -> Iterator[list[Tensor]]:
    """Collect the numbers of the experts of every layer with experts, [tokens, k] each, in the order of its calls."""
    used: list[Tensor] = []

    def note(_: Any, given: tuple[Any, ...], words: dict[str, Any]) -> None:
        used.append(next(x for x in (*given, *words.values()) if x.dim() == 2 and not x.is_floating_point()))

    named = [module for name, module in model.named_modules() if name.split(".")[-1] == "experts"]
    with ExitStack() as hooks:
        for module in named:
            hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        yield used


def differing(used: list[Tensor], recorded_SLk: np.ndarray) -> float:
    """Return the share of tokens for which some layer used other experts than were recorded, in whatever order."""
    used_SLk = torch.stack(used, dim=1).sort(-1).values
    recorded = torch.from_numpy(recorded_SLk.astype(np.int64)).sort(-1).values
    return float((used_SLk != recorded).flatten(1).any(1).double().mean())
