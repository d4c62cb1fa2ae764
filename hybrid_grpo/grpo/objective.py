"""The user's own loss, `grpo.objective`: found, and tried on a small example before a model loads."""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.fields import function_text
from hybrid_grpo.config.user_code import describe, import_object

Objective = Callable[..., Tensor]
"""Returns the scalar loss, given the arguments of `policy_loss` and, with `grpo.whole_groups`, `TrainBatch.group_b`."""


def load_objective(grpo: GrpoConfig) -> Objective | None:
    """Return the loss that `grpo.objective` names or is; None for the built-in one. Raises UserError if the name is
    wrong, `grpo.whole_groups` does not fit the loss's arguments, or a small example shows that it cannot learn."""
    chosen = grpo.objective
    if chosen is None:
        return None
    found: Objective = import_object(chosen, f"grpo.objective {chosen}") if isinstance(chosen, str) else chosen
    text, named = function_text(chosen), signature(found).parameters
    needs = "group_b" in named and named["group_b"].default is Parameter.empty
    takes = "group_b" in named or any(each.kind is Parameter.VAR_KEYWORD for each in named.values())
    refuse(
        needs and not grpo.whole_groups,
        f"grpo.objective {text} has an argument group_b, which takes grpo.whole_groups: set that to true",
    )
    refuse(
        grpo.whole_groups and not takes,
        f"grpo.whole_groups true tells the loss its groups, and grpo.objective {text} has no argument group_b: add it,"
        " or set grpo.whole_groups to false",
    )
    order = ["logp_bT", "old_logp_bT", "advantages_bT", "weight_bT", "grpo"]
    moved = [name for at, name in enumerate(named) if name in order and order.index(name) != at]
    refuse(bool(moved), f"grpo.objective {text} has {moved[:1]} in another place: its first arguments are {order}")
    for what, rows in (("two completions", 2), ("a row of padding", 0)):
        try:
            with torch.random.fork_rng(devices=[]):
                loss = _tried(found, grpo, rows)
        except Exception as error:
            missing = "ref_logp_bT" in named and not grpo.has_reference
            hint = "; ref_logp_bT is None without a reference: set grpo.beta" if missing else ""
            code = getattr(found, "__code__", None)
            why = describe(error, code and code.co_filename)
            raise UserError(f"grpo.objective {text}, tried on {what}, raised {why}{hint}") from error
        refuse(
            not (isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad and bool(loss.isfinite())),
            f"grpo.objective {text}, tried on {what}, returned {' '.join(f'{loss!r:.80}'.split())}: return a finite"
            " scalar tensor with a gradient",
        )
    return found


def _tried(objective: Objective, grpo: GrpoConfig, rows: int) -> Any:
    """The loss of a group of completions, as training would ask for it, or of a row that has no token."""
    shape = max(rows, 1), 3 if rows else 1
    real_bT = torch.ones(shape, dtype=torch.bool) & bool(rows)
    logp_bT = torch.linspace(-0.5, -2.0, real_bT.numel()).view(shape).requires_grad_()
    old_logp_bT = logp_bT.detach() * 1.1
    sign_b1 = torch.ones(shape[0], 1) - 2 * torch.arange(shape[0])[:, None]
    weight_bT = real_bT / max(rows * shape[1], 1)
    others: dict[str, Any] = {"ref_logp_bT": old_logp_bT * 1.1 if grpo.has_reference else None, "beta": grpo.beta}
    others |= {"correction_bT": None if grpo.sampler_correction == "none" else real_bT.float()}
    others |= {"drifts_bT": real_bT} if grpo.tokens == "kl_cov" else {}
    others |= {"group_b": torch.zeros(shape[0], dtype=torch.long)} if grpo.whole_groups else {}
    return objective(logp_bT, old_logp_bT, sign_b1 * real_bT, weight_bT, grpo, entropy_bT=-2 * logp_bT, **others)
