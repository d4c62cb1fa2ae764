"""Measures the memory of a model's forward and backward pass, without its weights and without computing anything.

What is kept for the backward pass differs too much between architectures for a table. So the model is built from its
configuration on fake tensors, which have shapes and types but no data, and a micro-batch's allocations are added up.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from hybrid_grpo.config import BatchPlan, LoraConfig, PolicyConfig, TrainConfig
from hybrid_grpo.data.batch import MicroBatch
from hybrid_grpo.data.packing import pack, pad, token_budget
from hybrid_grpo.generation.shape_probe import MemoryTracker, geometry_of
from hybrid_grpo.model.architectures import cached_numbers
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.eight_bits import eight_bit_layers, tables_of
from hybrid_grpo.model.layers import fuse
from hybrid_grpo.model.loading import training_attention, without_dropout
from hybrid_grpo.model.logprobs import HeadFunction, LogprobModel
from hybrid_grpo.model.lora import Adapters
from hybrid_grpo.model.routing import recomputed
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.model.states import install_state_functions
from hybrid_grpo.model.towers import loader, text_of

_ATTENDING = {"q_proj", "k_proj", "v_proj"}
HeadOf = Callable[[int, int], HeadFunction | None]
"""Returns what the head computes in addition, or None, from the number of target tokens and the vocabulary's size."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of one micro-batch, not counting the weights and the gradients that are already complete."""

    kept: int
    """What the layers keep for the backward pass, measured when the LM head begins."""
    head: int
    """The most that log-probabilities add to `kept`, forward and backward, including the head's gradient."""
    layers: int
    """The most that a single layer adds to `kept`: its temporaries, what gradient checkpointing recomputes, and, if the
    embeddings are tied, the head's gradient, which waits for the gradient of the embeddings."""
    hosted: int = 0
    """What goes into layers and waits in host memory, pinned."""

    @classmethod
    def of(cls, kept: int, forward: int, head: int, last: int, rest: int, hosted: int) -> Self:
        """Return the footprint, given what is alive when the head begins and the most that is until then, until the end
        of the head's backward pass, of the last layer's, and after it."""
        return cls(kept, head - kept, max(forward, last, rest) - kept, hosted)


class NeedsData(Exception):
    """Raised if a model cannot run on shapes alone, because its code reads the values of tensors."""


class DryRun:
    """A model built from a transformers configuration on fake tensors, as the policy trains it; `heads` say what its
    head computes in addition. `on_gpu`: with the kernels of a GPU in its layers, which keep less. Methods raise
    NeedsData if the model cannot run without data."""

    def __init__(
        self, model_config: Any, policy: PolicyConfig, lora: LoraConfig, heads: Sequence[HeadOf] = (), *,
        on_gpu: bool = False,
    ) -> None:  # fmt: skip
        self._heads, self._lora = heads, lora
        config = without_dropout(deepcopy(model_config))
        attention = training_attention(policy, config)
        self.packs = attention == ATTENTION
        """Whether the model takes micro-batches without padding."""
        # Kernels of flash-attn need a GPU; they keep the same tensors for backward as those of sdpa.
        attention = attention if attention in (ATTENTION, "eager") else "sdpa"
        names, text = ("num_experts", "num_local_experts", "n_routed_experts"), config.get_text_config()
        self._experts = next((count for name in names if (count := getattr(text, name, None))), 0)
        # Fake tensors support grouped experts in bfloat16 only: bytes count double if the policy has float32.
        dtype = torch.bfloat16 if self._experts else getattr(torch, policy.dtype)
        self._scale = getattr(torch, policy.dtype).itemsize // dtype.itemsize
        # peft moves its matrices, which fake tensors do not allow: they replace all weights only afterwards.
        with torch.device("meta"):
            self.model: Any = loader(config).from_config(config, dtype=dtype, attn_implementation=attention)
            head, modules = self.model.get_output_embeddings(), list(self.model.modules())
            self.linear = [m.weight.numel() for m in modules if type(m) is nn.Linear and m is not head]
            self.eight_bits = sum(linear.weight.numel() for *_, linear in eight_bit_layers(self.model))
            self.tables = sum(weight.numel() for weight in tables_of(self.model))
            if lora.rank:
                Adapters(self.model, lora, seed=0)
        lists = [m for m in text_of(self.model).modules() if isinstance(m, nn.ModuleList)]
        self._layers = next((m for m in lists if len(m) == text.num_hidden_layers), [head])
        # The tensors of a micro-batch are real.
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        vars(self._fake).update(stands_for_gpu=on_gpu)  # for `build.usable`
        with self._fake:
            self.model.to_empty(device="cpu")
        self.model.tie_weights()
        self.model.train()
        if policy.gradient_checkpointing:
            kept = partial(recomputed, policy.gradient_checkpointing is True)
            self.model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": kept})
        self._hosted, offloads = 0, on_gpu and policy.gradient_checkpointing == "offload"
        self._scored = LogprobModel(self.model, keeping=self._on_host if offloads else nullcontext)
        if on_gpu:
            fuse(self.model, None)
        # The engine moves gradients into its own buffers as soon as they are there.
        for parameter in filter(lambda parameter: parameter.requires_grad, self.model.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))

    def _on_host(self, _: Tensor) -> saved_tensors_hooks:
        def pack(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
            self._hosted += power_of_two(tensor.nbytes)
            return tensor.shape, tensor.dtype

        return saved_tensors_hooks(pack, lambda form: torch.empty(form[0], dtype=form[1]))

    def training(self, micro: MicroBatch) -> Footprint:
        return Footprint.of(*self.peaks(micro))

    def peaks(self, micro: MicroBatch) -> list[int]:
        """Return the arguments of `Footprint.of`."""
        with self._forward(micro, self._heads) as (tracker, marks, found):
            torch.stack([value_N.sum() for value_N in found]).sum().backward()
            rest = tracker.mark()
            marks += [rest] * (5 - len(marks))  # one, or two if the last layer's input was not seen
            return [self._scale * mark for mark in (*marks, self._hosted)]

    @torch.no_grad()
    def reading(self, micro: MicroBatch) -> int:
        """Return the most bytes that the layers take in a forward pass without gradients."""
        with self._forward(micro) as (_, marks, _):
            return self._scale * marks[1]

    @torch.no_grad()
    def cache_bytes(self, paged: bool, unmerged: bool = False) -> tuple[int, int]:
        """Return the bytes of one token's keys and values (0 without attention), and those of a sequence's states,
        which only the paged decoder lays out beforehand."""
        if paged:
            with torch.device("meta"):
                view = type(self.model)._from_config(deepcopy(self.model.config), attn_implementation=ATTENTION)
                if unmerged:
                    Adapters(view, self._lora, seed=0)  # of a layer with adapters, latents are not cached
            with self._fake:
                view.to_empty(device="cpu")
                install_state_functions(view)
                geometry = geometry_of(view)
                return self._scale * geometry.token_bytes, geometry.state_bytes
        return cached_numbers(self.model.config) * self._scale * self.model.dtype.itemsize, 0

    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def active_parameters(self) -> int:
        """Return the number of parameters that multiply one token: of experts, only those it uses; no embeddings."""
        tables = {id(m.weight) for m in self.model.modules() if isinstance(m, nn.Embedding)}
        tables.discard(id(self.model.get_output_embeddings().weight))
        active = sum(p.numel() for p in self.model.parameters() if id(p) not in tables)
        if self._experts:
            idle = 1 - self.model.config.get_text_config().num_experts_per_tok / self._experts
            active -= sum(int(idle * p.numel()) for name, p in self.model.named_parameters() if ".experts." in name)
        return active

    @contextmanager
    def _forward(
        self, micro: MicroBatch, heads: Sequence[HeadOf] = ()
    ) -> Iterator[tuple[MemoryTracker, list[int], tuple[Tensor, ...]]]:
        """Track the memory of a forward pass, including `heads`, and of the `with` block. Yield the tracker, marks in
        bytes, and the model's outputs. The marks are what is alive when the LM head begins, the most that was alive
        until then, and, after a backward pass, the most alive from then until the end of the head's backward pass, and
        from then until the end of the last layer's."""
        marks: list[int] = []
        last = self._layers[-1].register_forward_pre_hook(lambda _, inputs: at_last(*inputs))

        def at_last(hidden: Any = None, *_: Any) -> None:
            last.remove()  # as it may be computed again
            if hidden is not None and hidden.requires_grad:
                hidden.register_hook(lambda _: marks.append(tracker.mark()))

        def at_head(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            marks.extend((tracker.live, tracker.mark()))
            if inputs[0].requires_grad:
                inputs[0].register_hook(lambda _: marks.append(tracker.mark()))

        # Attention stores its masks in the micro-batch, where another forward would find them.
        ids_bS, positions_bS, *others = deepcopy(micro).inputs
        if micro.segments is None:
            positions_bS = None  # A model counts the positions of padded rows by itself.
        hook = self.model.get_output_embeddings().register_forward_pre_hook(at_head)
        with hook, last, self._fake, MemoryTracker([*self.model.parameters(), *self.model.buffers()]) as tracker:
            try:
                yield tracker, marks, self._scored(ids_bS, positions_bS, *others, 1.0, self._more(micro, heads))
            except (RuntimeError, NotImplementedError, AssertionError, LookupError) as error:
                raise NeedsData(str(error)) from error

    def _more(self, micro: MicroBatch, heads: Sequence[HeadOf]) -> HeadFunction | None:
        vocabulary = self.model.config.get_text_config().vocab_size
        found = [more for head in heads if (more := head(len(micro.target_N), vocabulary)) is not None]
        if not found:
            return None
        return lambda *args: tuple(tensor for more in found for tensor in more(*args))


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that a plan needs."""

    parameters: int
    trained: int
    """Number of parameters that have gradients and optimizer states: all, or those of the adapters."""
    largest: int
    """Elements of the largest tensor."""
    active: int
    vocabulary: int
    token_bytes: int
    """Bytes of the keys and values of one token."""
    training: Footprint
    reading: int
    """Bytes per token of a forward pass that reads prompts."""
    state_bytes: int = 0
    """Bytes of one sequence's states, in layers that carry one."""
    attending: int = 0
    """Number of parameters that compute queries, keys and values."""
    tokens: int = 0
    """Tokens of the micro-batch that `training` is for."""
    packs: bool = True
    linear: int = 0
    """Number of parameters in linear layers beside the head."""
    eight_bits: int = 0
    """Number of those that rollouts may read in eight bits."""
    largest_linear: int = 0
    tables: int = 0
    """Number of parameters in the embedding and the head that may be in eight bits."""
    shared_heads: int = 0
    """Attention heads, if ranks can share rows; 0 where these are padded, or layers have states."""
    padded: int = 0
    """Number of parameters, with that of each tensor rounded up to a power of two, as in pinned memory."""

    def of_tokens(self, tokens: int, dtype: int) -> Self:
        """Return the sizes with a micro-batch of fewer `tokens`, without another dry run: activations shrink with the
        tokens, but not the gradient of the largest tensor, the head or the embedding, in `dtype` bytes a number."""

        def shrunk(bytes_: int) -> int:
            fixed = min(bytes_, dtype * self.largest)
            return fixed + -(-(bytes_ - fixed) * tokens // self.tokens)

        head, layers = shrunk(self.training.head), shrunk(self.training.layers)
        kept, hosted = (-(-of * tokens // self.tokens) for of in (self.training.kept, self.training.hosted))
        return replace(self, training=Footprint(kept, head, layers, hosted), tokens=tokens)


def measure(
    config: TrainConfig, model_config: Any, batch: BatchPlan, prompt: int, heads: Sequence[HeadOf] = (), *, on_gpu: bool
) -> Sizes:
    """Return the sizes of a model, computed without its weights; `DryRun` explains `heads`. Where all layers are alike,
    what they take follows from runs with two of them and with three."""
    text, made = model_config.get_text_config(), partial(DryRun, heads=heads, on_gpu=on_gpu)
    layers, kinds = text.num_hidden_layers, {*(getattr(text, "layer_types", None) or ())}
    few = {2: 3 - layers, 3: layers - 2} if layers > 3 and len(kinds) < 2 else {}
    dry = made(model_config, config.policy, config.lora)
    runs = [(made(_with_layers(model_config, n), config.policy, config.lora), weight) for n, weight in few.items()]
    # Where the first layers differ from the others, so do their parameters.
    if sum(weight * run.parameters() for run, weight in runs) != dry.parameters():
        runs = [(dry, 1)]

    def added(of_runs: Iterable[Sequence[int]]) -> list[int]:
        return [sum(w * size for (_, w), size in zip(runs, of, strict=True)) for of in zip(*of_runs, strict=True)]

    parameters = list(dry.model.parameters())
    paged, unmerged = config.rollout.decoder == "paged", config.rollout.weights == "unmerged"
    token_bytes, state_bytes = added(run.cache_bytes(paged, unmerged) for run, _ in runs)
    micro = largest_micro_batch(config, batch, prompt, packs=dry.packs, on_gpu=on_gpu)
    [reading], peaks = added([run.reading(micro)] for run, _ in runs), [run.peaks(micro) for run, _ in runs]
    kept, forward, head, last, _, hosted = added(peaks)
    return Sizes(
        parameters=dry.parameters(),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        largest=max(p.numel() for p in parameters),
        active=dry.active_parameters(),
        vocabulary=dry.model.get_output_embeddings().weight.shape[0],
        token_bytes=token_bytes,
        # After the last layer's backward pass, the others keep less, and embeddings are the same for any number.
        training=Footprint.of(kept, forward, head, last, peaks[-1][4], hosted),
        # A forward takes memory in proportion to its tokens.
        reading=-(-reading // micro.input_ids_bS.numel()),
        state_bytes=state_bytes,
        tokens=micro.input_ids_bS.numel(),
        packs=dry.packs,
        linear=sum(dry.linear),
        eight_bits=dry.eight_bits,
        largest_linear=max(dry.linear, default=0),
        tables=dry.tables,
        shared_heads=getattr(model_config.get_text_config(), "num_attention_heads", 0)
        * (dry.packs and not state_bytes),
        attending=sum(p.numel() for name, p in dry.model.named_parameters() if _ATTENDING & {*name.split(".")}),
        padded=sum(power_of_two(p.numel()) for p in parameters),
    )


def _with_layers(model_config: Any, count: int) -> Any:
    """Return a model's configuration with its first layers."""
    copy = deepcopy(model_config)
    text = copy.get_text_config()
    lists = {name: value for name, value in vars(text).items() if isinstance(value, list)}
    cut = {name: value[:count] for name, value in lists.items() if len(value) == text.num_hidden_layers}
    for name, value in {**cut, "num_hidden_layers": count}.items():
        setattr(text, name, value)
    return copy


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is not below a size, to which torch rounds allocations in pinned memory."""
    return 1 << (size - 1).bit_length()


def largest_micro_batch(config: TrainConfig, batch: BatchPlan, prompt: int, *, packs: bool, on_gpu: bool) -> MicroBatch:
    """Return the largest micro-batch of full-length prompts and completions; it has no padding if the model `packs`."""
    prompts = batch.prompts_per_rank // batch.num_minibatches
    # No two prompts are the same, and no two completions.
    split = config.engine.sequence_parallel  # a rank has so much of each row
    length, prompt = -(-config.rollout.longest(prompt) // split), -(-prompt // split)
    prompt_ids = [[row // batch.num_generations] * prompt for row in range(prompts * batch.num_generations)]
    completion_ids = [[row] * max(1, length - prompt) for row in range(len(prompt_ids))]
    budget = token_budget(config.policy, on_gpu=on_gpu, gradients=True)
    rows, cpu = TokenRow.of(prompt_ids, completion_ids), torch.device("cpu")
    together = batch.num_generations if config.grpo.whole_groups else 1
    share = config.policy.shared_prefix
    if packs:
        parts = pack(rows, budget, cpu, share=share, together=together)
    else:
        parts = pad(rows, budget, cpu, together=together)
    return max(parts, key=lambda part: part.input_ids_bS.numel())
