"""Routing replay: in training, a token goes through the experts that it went through while it was sampled.

In half precision a router's scores differ a little between a decode step and the packed training forward, and where two
experts are close, another one is chosen. So the sampler records the experts of every token, and the training forward
uses them; their weights are computed by the router that is trained, with gradients (R3, arXiv:2510.11370).

A router of transformers chooses by one call of `topk`, whatever it does before and after. `install_routers` makes
routers pass that choice to what the forward was `routed` by.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.model.sidecars import Piece, find
from hybrid_grpo.model.upload import upload

FREE = -1
"""Stands for the experts of a token that was not recorded: the router chooses."""
_CHOICES = {"self.top_k", "self.config.top_k_experts"}
"""What routers call the number of experts of a token, in the call of `topk` that chooses them."""
_OF_GROUPS = {"2", "self.topk_group"}
"""Their numbers in other calls, which choose groups of experts (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""


@dataclass(frozen=True, eq=False)
class Routing:
    """The experts that every layer chose for the tokens of a completion, of uint8 or int16."""

    prompt: np.ndarray
    """[prompt tokens, layers, k]; one array for the completions of a group."""
    completion: np.ndarray
    """[tokens after the prompt - 1, layers, k]: the last token is not read, nor the last of an agent's history."""
    name: ClassVar = "experts"

    def part(self, sampled: slice, read: slice) -> Self:
        return type(self)(self.prompt, self.completion[read])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(parts[0].prompt, np.concatenate([part.completion for part in parts]))

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.prompt, self.completion

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Routing) and all(map(np.array_equal, self.arrays(), other.arrays()))


class Routes(Protocol):
    """What a forward is `routed` by."""

    def route(self, layer: int, experts_Sk: Tensor, count: int) -> Tensor:
        """Return the experts to use, int64 [S, k], given those that a layer would choose out of `count`."""


_routes: ContextVar[Routes | None] = ContextVar("routes")


class routed(AbstractContextManager[None]):
    """Routes the forwards within by `routes`; None leaves them to their routers. If nested, the outermost counts. It
    is entered `within` another context, if one is given."""

    def __init__(self, routes: Routes | None, within: AbstractContextManager[Any] | None = None) -> None:
        self._own, self._within = routes, within or nullcontext()

    def __enter__(self) -> None:
        self._within.__enter__()
        self._token = _routes.set(_routes.get(self._own))

    def __exit__(self, *error: Any) -> None:
        _routes.reset(self._token)
        self._within.__exit__(*error)


_ATTENTION = (
    *("hybrid_grpo.segment_attention", "torch_attn._varlen_attn", "flash_attn._flash_attn_varlen_forward"),
    *("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu"),
    *("aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention"),
)
LONG = 16_384
"""Of more tokens, the attention of a checkpointed layer is kept: it is most of its time, and as large as its input."""
tokens: ContextVar[int] = ContextVar("tokens", default=0)
"""Number of tokens of the forward that is running."""


def recomputed(keeps: bool = True) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a checkpointed layer's forward, which `keeps` the attention of long rows or not, and of
    its recomputation, which is routed as that is."""
    if tokens.get() <= LONG or not keeps:
        return nullcontext(), routed(_routes.get(None))
    found = (getattr(getattr(torch.ops, space), name, None) for space, name in (of.split(".") for of in _ATTENTION))
    kept, again = create_selective_checkpoint_contexts([operator.default for operator in found if operator])
    return kept, routed(_routes.get(None), again)


class _Choice(TorchFunctionMode):
    """Passes a router's choice of experts to `routes`."""

    def __init__(self, routes: Routes, router: Any, layer: int) -> None:
        super().__init__()
        self._routes, self._layer, self._groups = routes, layer, getattr(router, "num_group", None)
        self._k = _chosen_by(router)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        scores, indices = args[0], found.indices
        # Not the choice of groups, or of the best experts in each group.
        chooses = scores.dim() == 2 and indices.shape[-1] == self._k and scores.shape[-1] != self._groups
        chosen = self._routes.route(self._layer, indices, scores.shape[-1]) if chooses else indices
        return found if chosen is indices else torch.return_types.topk((scores.gather(-1, chosen), chosen))


def install_routers(model: Any) -> int:
    """Make the routers of a model look at what its forward is `routed` by. Return their number; 0 if the model has no
    routers that choose in the way that `_routers_in` recognizes."""
    routers = [m for m in model.modules() if type(m).__name__ in _routers_in(type(m).__module__)]
    if len({_chosen_by(router) for router in routers}) != 1:
        return 0
    for layer, router in enumerate(routers):
        if not isinstance(router.forward, functools.partial):
            router.forward = functools.partial(_forward, router, layer, router.forward)
    return len(routers)


def replays(model: Any, policy: PolicyConfig, *, paged: bool) -> bool | None:
    """Return whether `policy.routing` makes a model replay the experts that were recorded; None if none are. They are
    recorded by the paged decoder and replayed in packed rows. The model's routers are installed. Raises UserError."""
    recorded = paged and install_routers(model) > 0
    refuse(
        policy.routing == "replay" and not recorded,
        f"policy.routing replay: {type(model).__name__} has no experts whose choice can be replayed, or its rows are"
        " not packed, or rollout.decoder is not paged: set policy.routing to auto",
    )
    if not recorded:
        return None
    return policy.routing == "replay" or (policy.routing == "auto" and policy.dtype != "float32")


def described(model: Any, replayed: bool | None) -> str | None:
    """Return what training does with a model's experts, given what `replays` returns; None if it has none."""
    if not any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules()):
        return None
    if replayed is None:
        kind = type(model).__name__
        return f"routers choose again in training: those of {kind} are not known, or its rows are not packed"
    again = "routers choose again in training, which policy.routing replay prevents"
    return "training uses those that the sampler used" if replayed else again


def _chosen_by(router: Any) -> int:
    k: int = router.top_k if hasattr(router, "top_k") else router.config.top_k_experts
    return k


def _forward(router: Any, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    routes = _routes.get(None)
    with nullcontext() if routes is None else _Choice(routes, router, layer):
        return forward(*args, **kwargs)


@functools.cache
def _routers_in(module: str) -> frozenset[str]:
    """Return the names of a module's classes that choose nothing but experts, or groups of them, by `topk`."""
    source = inspect.getsource(sys.modules[module]) if module.startswith("transformers.models.") else ""
    classes = ast.parse(source).body if "topk(" in source else []
    return frozenset(each.name for each in classes if isinstance(each, ast.ClassDef) and _chooses_experts(each))


def _chooses_experts(tree: ast.ClassDef) -> bool:
    numbers = set[str]()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "topk":
            k = [word.value for word in call.keywords if word.arg == "k"]
            k += call.args[1:2] if ast.unparse(call.func) == "torch.topk" else call.args[:1]
            numbers |= {ast.unparse(number) for number in k}
    return bool(numbers & _CHOICES) and numbers <= _CHOICES | _OF_GROUPS


def joined(parts: Sequence[tuple[np.ndarray | None, int]]) -> np.ndarray | None:
    """Return the experts of sequences one after the other, int16 [S, layers, k], given those of the first tokens of
    each and its number of tokens; `FREE` for the other tokens. None if nothing is given."""
    known = next((part for part, _ in parts if part is not None and len(part)), None)
    if known is None:
        return None
    every = np.full((sum(length for _, length in parts), *known.shape[1:]), FREE, np.int16)
    begin = 0
    for part, length in parts:
        if part is not None:
            every[begin : begin + len(part[:length])] = part[:length]
        begin += length
    return every


class RoutingProbe:
    """Routes nothing, and notes the shape of what there is to record."""

    def __init__(self) -> None:
        self.shape: tuple[int, int, int] | None = None
        """Layers, experts of a token in each, and experts to choose from; None without any."""

    def route(self, layer: int, experts_Sk: Tensor, count: int) -> Tensor:
        layers, _, most = self.shape or (0, 0, 0)
        self.shape = max(layers, layer + 1), experts_Sk.shape[1], max(most, count)
        return experts_Sk


class Recorder:
    """Records the experts of a sampler's forward: `pool` is [pages, page, layers, k], and the arguments [S] are the
    place of every token in it. If given, `known` are the experts to use, as from `joined`."""

    def __init__(self, pool: Tensor, page_S: Tensor, offset_S: Tensor, known: np.ndarray | None = None) -> None:
        self._pool, self._page_S, self._offset_S = pool, page_S, offset_S
        self._known = None if known is None else upload(known, pool.device)

    def route(self, layer: int, experts_Sk: Tensor, count: int) -> Tensor:
        used_Sk = experts_Sk if self._known is None else _used(self._known[:, layer], experts_Sk)
        self._pool[self._page_S, self._offset_S, layer] = used_Sk.to(self._pool.dtype)
        return used_Sk


class Replay:
    """Routes a packed row by the `recorded` experts, int16 [S, layers, k], if `replays`; else only compares them."""

    def __init__(self, recorded: np.ndarray, replays: bool, device: torch.device) -> None:
        self._recorded_SLk, self._replays = upload(recorded, device), replays
        self._own: dict[int, Tensor] = {}
        self._counts: dict[int, int] = {}

    @classmethod
    def of(cls, pieces: Sequence[Piece], replays: bool, device: torch.device) -> Self | None:
        """Return the replay of packed rows; None if nothing is recorded."""
        parts = [(find(piece.row.sidecars, Routing), piece) for piece in pieces]
        known = [None if of is None else np.concatenate(of.arrays())[p.begin : p.end] for of, p in parts]
        experts = joined([(of, piece.tokens) for of, piece in zip(known, pieces, strict=True)])
        return None if experts is None else cls(experts, replays, device)

    def route(self, layer: int, experts_Sk: Tensor, count: int) -> Tensor:
        self._own[layer], self._counts[layer] = experts_Sk.to(torch.int16), count
        return _used(self._recorded_SLk[:, layer], experts_Sk) if self._replays else experts_Sk

    def numbers(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return metrics of the last forward, each with the number of tokens that it is about."""
        layers = sorted(self._own)
        recorded_SLk = torch.stack([self._recorded_SLk[:, layer] for layer in layers], dim=1)
        own_SLk = torch.stack([self._own[layer] for layer in layers], dim=1).long()
        used_SLk = _used(recorded_SLk, own_SLk) if self._replays else own_SLk
        known_S = recorded_SLk[:, 0, 0] != FREE
        tokens = known_S.sum()
        loads = [_load(used_SLk[:, i], known_S, self._counts[layer]) for i, layer in enumerate(layers)]
        return {
            "moe/differs_frac": ((_differ(used_SLk, recorded_SLk) & known_S).sum() / tokens, tokens),
            "moe/would_differ_frac": ((_differ(own_SLk, recorded_SLk) & known_S).sum() / tokens, tokens),
            "moe/load_max": (torch.stack(loads).mean(), tokens),
        }


def _used(recorded: Tensor, own: Tensor) -> Tensor:
    return torch.where(recorded == FREE, own, recorded.long())


def _differ(one_SLk: Tensor, other_SLk: Tensor) -> Tensor:
    """Whether the experts of a token differ in some layer, in whatever order, bool [S]."""
    return (one_SLk.sort(-1).values != other_SLk.long().sort(-1).values).flatten(1).any(1)


def _load(experts_Sk: Tensor, known_S: Tensor, count: int) -> Tensor:
    """Return the largest number of known tokens of an expert, relative to the mean over all experts."""
    load = torch.zeros(count, device=experts_Sk.device)
    load.scatter_add_(0, experts_Sk.flatten(), known_S.float().repeat_interleave(experts_Sk.shape[1]))
    return load.max() / load.mean()
