"""What one forward and backward keeps in memory, seen from a run on tensors without storage.

No two architectures keep the same for backward, and no table would know the next one: the model is built from its
configuration on fake tensors, which have shapes and types but no data, runs one micro-batch, and every allocation and
release of the run is added up. No weight is read and nothing is computed. Layers that are alike keep alike: one or two
of each kind are run, and stand for the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from hybrid_grpo.config import LoraConfig, PolicyConfig
from hybrid_grpo.data.batch import MicroBatch
from hybrid_grpo.generation.cache import Geometry
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.loading import training_attention, without_dropout
from hybrid_grpo.model.logprobs import LogitShape, token_logprobs
from hybrid_grpo.model.lora import Adapters
from hybrid_grpo.model.view import meta_copy

MALLOC_KEEPS = 32 << 20
"""Blocks below this size stay with a process on a CPU once they are freed, for its next ones: glibc asks the system for
every larger one, and returns it (mallopt(3), M_MMAP_THRESHOLD, whose dynamic bound this is)."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of one micro-batch, beside weights and finished gradients."""

    kept: int
    """What the layers keep for backward, when the head begins."""
    kept_small: int
    """Of that, in tensors that malloc does not give back to the system (`MALLOC_KEEPS`)."""
    head: int
    """The most that log-probabilities add to that, forward and backward; the head's gradient among it."""
    layers: int
    """The most that forward and backward of the layers add to that: the temporaries of one layer, with gradient
    checkpointing all that it recomputes; where the embedding is the head, the head's gradient as long as it waits."""
    passing_small: int
    """The most that such small tensors add to `kept_small`."""

    @property
    def small(self) -> int:
        """The most that is taken at one time by tensors that malloc does not give back to the system."""
        return self.kept_small + self.passing_small


class NeedsData(Exception):
    """The model cannot be run on shapes alone: its code asks for values, or its layers are not found."""


class _Ledger(TorchDispatchMode):
    """Bytes of the storages that are alive, and the most there were since `mark`: of all, and of the small ones."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = (0, 0)
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self._add(size, 1)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._add(size, -1)

    def _add(self, size: int, sign: int) -> None:
        small = size if size < MALLOC_KEEPS else 0
        self.live = (self.live[0] + sign * size, self.live[1] + sign * small)
        self.peak = (max(self.peak[0], self.live[0]), max(self.peak[1], self.live[1]))

    def mark(self) -> tuple[int, int]:
        """The most since the last mark."""
        peak, self.peak = self.peak, self.live
        return peak


class _Stack:
    """The layers of a model, and models that are like it with a few of them only."""

    def __init__(self, model: Any) -> None:
        self._config = model.config.get_text_config()
        depth = self._config.num_hidden_layers
        places = [
            (module, name)
            for module in model.base_model.modules()
            for name, child in module.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == depth
        ]
        if not places:
            raise NeedsData(f"{type(model).__name__} has no list of {depth} layers")
        self._place = places[0]
        # Which attention a layer has, and the like.
        self._lists = {
            name: value for name, value in vars(self._config).items() if isinstance(value, list) and len(value) == depth
        }
        module, name = self._place
        self._layers = getattr(module, name)
        self._kinds: dict[Any, list[int]] = {}
        for number, layer in enumerate(self._layers):
            shapes = tuple((name, p.shape, p.requires_grad) for name, p in layer.named_parameters())
            listed = (str(value[number]) for value in self._lists.values())
            self._kinds.setdefault((shapes, *listed), []).append(number)

    def samples(self) -> list[list[int]]:
        """One layer of each kind; and for each kind that has more, two of it and one of each other."""
        kinds = list(self._kinds.values())
        one = [numbers[:1] for numbers in kinds]
        more = [[*one[:i], numbers[:2], *one[i + 1 :]] for i, numbers in enumerate(kinds) if len(numbers) > 1]
        return [sorted(number for numbers in sample for number in numbers) for sample in (one, *more)]

    def others(self) -> list[int]:
        """For each kind that has more than one layer: how many more."""
        return [len(numbers) - 1 for numbers in self._kinds.values() if len(numbers) > 1]

    @contextmanager
    def cut(self, numbers: list[int]) -> Iterator[None]:
        """Inside, the model has these layers only."""
        module, name = self._place
        setattr(module, name, nn.ModuleList(self._layers[number] for number in numbers))
        for listed, value in self._lists.items():
            vars(self._config)[listed] = [value[number] for number in numbers]
        try:
            yield
        finally:
            setattr(module, name, self._layers)
            vars(self._config).update(self._lists)


class DryRun:
    """A model of the given configuration on fake tensors.

    Args:
        model_config: transformers configuration.
        policy: type of the weights, attention and gradient checkpointing.
        lora: adapters that are trained in place of the weights.

    Raises:
        NeedsData: (the methods) the model cannot be run without data.
    """

    def __init__(self, model_config: Any, policy: PolicyConfig, lora: LoraConfig) -> None:
        config = without_dropout(deepcopy(model_config))
        text = config.get_text_config()
        # Fake products of grouped experts exist in bfloat16 only.
        dtype = "bfloat16" if _experts(text) else policy.dtype
        self._scale = 2 if dtype != policy.dtype else 1
        attention = training_attention(policy, config)
        self.packs = attention == ATTENTION
        """Whether it takes micro-batches without padding."""
        # Kernels of flash-attn need a GPU; what they keep for backward is what sdpa's keep.
        attention = attention if attention in (ATTENTION, "eager") else "sdpa"
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype), attn_implementation=attention
            )
            if lora.rank:
                Adapters(self.model, lora, seed=0)
        # A micro-batch is there, and has data.
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._put_on_cpu(self.model)
        self.model.train()
        if policy.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._shape = LogitShape.of(text)
        self._stack = _Stack(self.model)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                # Gradients are the engine's business: it moves them into its own buffers as soon as they are there.
                parameter.register_post_accumulate_grad_hook(_drop)

    def training(self, micro: MicroBatch) -> Footprint:
        """Forward and backward of a micro-batch."""
        few, *more = [self._training(micro, layers) for layers in self._stack.samples()]
        grown = list(zip(self._stack.others(), more, strict=True))
        most = more or [few]
        return Footprint(
            kept=few.kept + sum(count * (run.kept - few.kept) for count, run in grown),
            kept_small=few.kept_small + sum(count * (run.kept_small - few.kept_small) for count, run in grown),
            head=few.head,
            layers=max(run.layers for run in most),
            passing_small=max(run.passing_small for run in most),
        )

    def _training(self, micro: MicroBatch, layers: list[int]) -> Footprint:
        """As if there were these layers only."""
        # Attention keeps its masks with the micro-batch, where another run would find them.
        micro = deepcopy(micro)
        with self._stack.cut(layers), self._run() as ledger:
            hidden_ND = self._hidden(micro)
            (kept, small), (forward, _) = ledger.live, ledger.mark()
            logp_N, entropy_N = self._logprobs(hidden_ND, micro.target_N)
            heads: list[tuple[int, int]] = []
            hidden_ND.register_hook(lambda _: heads.append(ledger.mark()))
            del hidden_ND
            (logp_N.sum() + entropy_N.sum()).backward()
            backward, backward_small = ledger.mark()
            sizes = (kept, small, heads[0][0] - kept, max(forward, backward) - kept)
            passing_small = max(heads[0][1], backward_small) - small
            return Footprint(*(self._scale * size for size in (*sizes, passing_small)))

    @torch.no_grad()
    def inference(self, micro: MicroBatch) -> tuple[int, int]:
        """The most bytes of a forward without gradients: of its layers, and with log-probabilities."""
        with self._stack.cut(self._stack.samples()[-1]), self._run() as ledger:
            hidden_ND = self._hidden(micro)
            layers = ledger.peak[0]
            self._logprobs(hidden_ND, micro.target_N)
            return self._scale * layers, self._scale * ledger.peak[0]

    @torch.no_grad()
    def cache_bytes(self, paged: bool) -> int:
        """Bytes of one token's keys and values; 0 without attention."""
        if paged:
            view = self._put_on_cpu(meta_copy(self.model, ATTENTION))
            with self._fake:
                return self._scale * Geometry.of(view).token_bytes
        text = self.model.config.get_text_config()
        if not (attention_heads := getattr(text, "num_attention_heads", 0)):
            return 0
        heads = getattr(text, "num_key_value_heads", None) or attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // attention_heads
        return 2 * text.num_hidden_layers * heads * head_dim * self._scale * self.model.dtype.itemsize

    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with: of experts those that it is sent to, of embeddings none."""
        text = self.model.config.get_text_config()
        share = text.num_experts_per_tok / experts if (experts := _experts(text)) else 1.0
        tables = {id(m.weight) for m in self.model.modules() if isinstance(m, nn.Embedding)}
        tables -= {id(self.model.get_output_embeddings().weight)}
        return sum(
            int(parameter.numel() * (share if ".experts." in name else 1.0))
            for name, parameter in self.model.named_parameters()
            if id(parameter) not in tables
        )

    @contextmanager
    def _run(self) -> Iterator[_Ledger]:
        with self._fake, _Ledger([*self.model.parameters(), *self.model.buffers()]) as ledger:
            try:
                yield ledger
            except (RuntimeError, NotImplementedError, AssertionError, LookupError) as error:
                raise NeedsData(str(error)) from error

    def _put_on_cpu(self, model: nn.Module) -> nn.Module:
        """The model with fake tensors of a CPU in place of those of the meta device, on which masks are not made."""
        made: dict[int, Tensor] = {}

        def fake(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                like = torch.empty(tensor.shape, dtype=tensor.dtype)
                like = nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like
                made[id(tensor)] = like
            return made[id(tensor)]

        with self._fake:
            for module in model.modules():
                # Some keep a constant as a plain attribute.
                places: list[dict[str, Any]] = [module._parameters, module._buffers, module.__dict__]
                for tensors in places:
                    for name, tensor in tensors.items():
                        if isinstance(tensor, Tensor):
                            tensors[name] = fake(tensor)
        return model

    def _hidden(self, micro: MicroBatch) -> Tensor:
        """The states that tokens are scored from; see `LogprobModel`."""
        # Without segments positions are those that a model counts by itself.
        packed = {} if micro.segments is None else {"batch": micro.segments, "position_ids": micro.position_ids_bS}
        out = self.model.base_model(input_ids=micro.input_ids_bS, use_cache=False, **packed)
        return micro.source(out.last_hidden_state.flatten(0, 1))

    def _logprobs(self, hidden_ND: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        return token_logprobs(hidden_ND, head.weight, head.bias, target_N, shape=self._shape)


def _experts(text_config: Any) -> int:
    """Experts of a layer; 0 where it has none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for name in names if (count := getattr(text_config, name, None))), 0)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
