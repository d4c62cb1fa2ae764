"""Estimates the memory that a GRPO run will take, by part and phase, before its weights are read.

It needs the configuration, the model's configuration and the number of ranks. What a model's layers keep for the
backward pass comes from a run without data (dry_run.py); what DeepSpeed and the decoder hold follows from their code.
The numbers are meant for GPUs; on a CPU, where freed memory stays with the process, they are accurate within 25 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.config.adapters import is_adapter
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.pictures import ImageStore
from hybrid_grpo.distributed.hardware import CUDA_CONTEXT_BYTES, Hardware
from hybrid_grpo.generation import Workspace
from hybrid_grpo.generation.cache import GPU_SHARE, MARGIN, prefill_that_fits
from hybrid_grpo.generation.graphs import bytes_of
from hybrid_grpo.generation.loop import PAGE
from hybrid_grpo.generation.state_pool import rows_for
from hybrid_grpo.model.loading import load_config
from hybrid_grpo.model.towers import tower_parameters
from hybrid_grpo.rewards.models.reward_model import RewardModel
from hybrid_grpo.run.memory import optimizer, remedies
from hybrid_grpo.run.memory.dry_run import NeedsData, Sizes, measure, power_of_two
from hybrid_grpo.run.memory.phases import FeatureMemory, Part, Phase, gib

KEPT_BELOW = 0.85
"""Memory of decoding stays on the GPU during training if all phases then need at most this share of the free memory.
The rest is a margin for errors of the plan, so that training does not run out of memory because of what is kept."""
NCCL_BYTES = 400 << 20
"""NCCL's buffers between several ranks: about 24 channels of 8 MiB in each direction. Assumed, not measured."""
_FRAGMENTS = 0.05
"""Memory that torch holds in addition to its tensors, as a share of them, with the expandable segments that a run
enables. Assumed, not measured."""
_NOT_OF_TENSORS = ("runtime", "NCCL", "allocator")
"""Parts on a GPU that torch does not report as allocated."""
PROCESS_GROWTH_BYTES = 90 << 20
"""Growth of a process on a CPU after the plan: engine, process group, C kernels, BLAS. Measured, rounded."""
_CPU_HEAP = 1.5
"""Ratio of the memory that activations take on a CPU to their bytes: malloc leaves holes between blocks. Measured."""
_PACKED_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of a weight in four bits: with a scale in eight bits for each 64, and one in 32 bits for each 256 of these
(QLoRA, arXiv:2305.14314, section 3)."""
_MAX_LIVE, _BUCKET, _SUB_GROUP = 10**9, 5 * 10**8, 10**9
"""DeepSpeed's defaults, in elements: gathered weights alive at a time, a gradient bucket, a group of ZeRO-3's step."""


def estimate(
    config: TrainConfig, batch: BatchPlan, prompt: int, hardware: Hardware, models: Sequence[RewardModel] = (),
    held_out: int = 0, held_out_longest: int = 0, album: ImageStore | None = None, model_config: Any = None,
) -> Plan | None:  # fmt: skip
    """Return the memory plan of a run, whose prompts have the pictures of an `album`; None if the model cannot run
    without data. `model_config` is by default that of `policy.model`. Raise UserError if it has no configuration, or
    lacks the attention or adapters in the settings."""
    classes = [feature.load() for feature in config.active_features]
    features = [of.memory(config) for of in classes if of is not None and of.memory is not None]
    model_config = model_config or load_config(config.policy.model)

    seen, heads = dict[str, Sizes](), [feature.head for feature in features]

    def measured(config: TrainConfig, batch: BatchPlan) -> Sizes:
        if (name := repr((config, batch))) not in seen:
            seen[name] = measure(config, model_config, batch, prompt, heads, on_gpu=hardware.on_gpu)
        return seen[name]

    try:
        sizes = measured(config, batch)
    except NeedsData:
        if hardware.on_gpu and config.rollout.keep_cache == "on":
            raise UserError(
                "rollout.keep_cache on needs a plan of memory, and the code of policy.model"
                f" {config.policy.model} cannot run without data: set it to auto"
            ) from None
        return None
    tower = tower_parameters(model_config) if album is not None and not album.empty else 0
    return Plan(config, sizes, batch, prompt, hardware, models, held_out, held_out_longest, features, tower, measured)


@dataclass
class Plan:
    """Memory of one rank by part and phase."""

    config: TrainConfig
    sizes: Sizes
    """Sizes of the model."""
    batch: BatchPlan
    prompt: int
    """Number of tokens in the longest prompt."""
    hardware: Hardware
    models: Sequence[RewardModel] = ()
    """Reward models, not loaded yet. Their weights are counted, their activations are not."""
    held_out: int = 0
    """Number of completions in an evaluation, over all ranks."""
    held_out_longest: int = 0
    """Number of tokens in the longest prompt of an evaluation with its completion."""
    features: Sequence[FeatureMemory] = ()
    tower: int = 0
    """Number of parameters of the tower that sees pictures."""
    measured: Callable[[TrainConfig, BatchPlan], Sizes] | None = None
    """Makes another dry run, for other settings of `policy`; takes seconds."""

    def __post_init__(self) -> None:
        config, self.gpu, self.ranks = self.config, self.hardware.on_gpu, self.batch.world_size
        self.stage, self.dtype = config.engine.stage(self.ranks), 2 if config.policy.dtype == "bfloat16" else 4
        self.n, self.t = self.sizes.parameters, self.sizes.trained
        self.packed = self.sizes.linear + self.sizes.tables if config.lora.load_in_4bit else 0
        """Number of parameters in four bits, or, of the embedding and the head, in eight."""
        self.weights = config.rollout.weights
        self.owned = -(-self.t // self.ranks) if self.stage else self.t  # elements that this rank's optimizer steps
        zero = config.engine.deepspeed.get("zero_optimization", {})
        self.hosted = self.gpu and zero.get("offload_param", {}).get("device", "none") != "none"
        """Whether the weights are in host memory."""
        self.second = 1 / hpz if (hpz := zero.get("zero_hpz_partition_size", 1)) > 1 else 0.0
        """Share of the weights in the second shard of ZeRO++, from a forward pass to the next optimizer step."""
        self.sharded = self.stage == 3 and (self.ranks > 1 or self.hosted)
        """Whether generation and training gather weights."""
        self.usable = int((1 - MARGIN) * self.hardware.device_bytes) if self.gpu else self.hardware.device_bytes
        """Bytes of the device that a run may take."""
        self.bucket = int(float(zero.get("reduce_bucket_size", _BUCKET)))
        self.buckets = 2 if zero.get("overlap_comm") and self.stage < 3 else 1
        self.live = int(float(zero.get("stage3_max_live_parameters", _MAX_LIVE)))
        self.offloads = config.engine.offload_optimizer is True
        self.parks = self.gpu and config.engine.offload_optimizer == "between_steps"
        self.can_park = self.gpu and self.stage > 1 and not (self.offloads or self.parks or "offload_optimizer" in zero)
        """Whether optimizer states are on the GPU and could leave it between steps."""
        self.pins = self.gpu and zero.get("offload_optimizer", {}).get("pin_memory", True)
        self.sub_group = int(float(zero.get("sub_group_size", 0))) or _SUB_GROUP
        groups = self.batch.prompts_per_rank - (-config.rollout.carried_groups // self.ranks)
        self.rows = groups * config.rollout.num_generations
        self.process = Part("runtime", self.hardware.process_bytes + PROCESS_GROWTH_BYTES)
        self.export = Part("copy to write", self.dtype * self.n)
        kept = int(config.policy.picture_cache_gb * 2**30) if self.tower else 0
        self.pictures = Part("pictures", kept, "a lower policy.picture_cache_gb")
        self.slots = min(config.rollout.max_slots, self.rows)
        self.longest = config.rollout.longest(self.prompt)
        # Rollouts and evaluations share the cache.
        self.longest_cached = max(self.longest, self.held_out_longest)
        self.pages, self.bytes_of_page = -(-self.longest_cached // PAGE), PAGE * self.sizes.token_bytes
        # Evaluations use the kept slots too.
        self.kept_slots = min(config.rollout.max_slots, max(self.rows, -(-self.held_out // self.ranks)))
        wish = config.rollout.keep_cache if config.rollout.decoder == "paged" else "off"
        self.keeps = self.gpu and wish != "off"
        """Whether the memory of decoding stays on the GPU while the policy trains."""
        self.refers = False
        """Whether the reference is on the GPU, where its forward waits for no copies; one that moves never is."""
        if self.keeps and wish == "auto":
            self.keeps = self.peak.bytes <= KEPT_BELOW * self.hardware.device_bytes
        if self.keeps and not self.hosted and not config.grpo.ref_every and self.reference().bytes:
            self.refers = True
            self.refers = self.peak.bytes <= KEPT_BELOW * self.hardware.device_bytes

    def workspace(self) -> Workspace | None:
        """Return the sizes of the decoding memory that the run keeps; None if it is released after each rollout."""
        return Workspace(self.kept_slots, self.longest_cached) if self.keeps else None

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def lacking(self) -> Phase | None:
        """The phase that needs most, if that is more than it may take; `host`, if that lacks memory; else None."""
        worst = max(self.phases, key=lambda phase: phase.least)
        if worst.least > self.usable:
            return worst
        return self.host if self.host.least > self.hardware.host_bytes else None

    @property
    def measurable(self) -> int:
        """The peak in bytes as a run measures it: resident memory on a CPU, memory of torch's tensors on a GPU."""
        unseen = _NOT_OF_TENSORS if self.gpu else ()
        return max(sum(part.bytes for part in phase.parts if part.name not in unseen) for phase in self.phases)

    @property
    def sequences(self) -> int:
        """Number of sequences of the longest length that the cache holds at once."""
        cache = next(part for phase in self.phases for part in phase.parts if part.name == "keys and values")
        each = (self.pages + 1) * self.bytes_of_page + self.carried // self.laid_out
        return min(self.laid_out, max(1, (cache.bytes - 2 * self.bytes_of_page) // each))

    def __str__(self) -> str:
        largest = ", ".join(f"{gib(p.bytes)} {p.name}" for p in sorted(self.peak.parts, key=lambda p: -p.bytes)[:3])
        also = ", the cache stays during training" * self.keeps + ", the reference is on the GPU" * self.refers
        tokens, recomputed = self.config.policy.micro_batch_tokens, self.config.policy.gradient_checkpointing
        also += f", gradient checkpointing {recomputed}".lower() * bool(recomputed)
        also += f", micro-batches of {tokens} tokens" * bool(tokens)
        needed, free = f"{gib(self.peak.bytes)} GiB a rank at ZeRO-{self.stage}", gib(self.hardware.device_bytes)
        return f"about {needed} ({self.peak.name}: {largest}, ...), {free} GiB are free{also}"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of a step after the first, when all optimizer states exist, and the export. The scoring passes of
        the reference and the sampler are left out: they keep nothing for a backward pass, so they need less memory."""
        kept = [self.gathered(), self.graphs(), self.cache()] if self.keeps else []
        fixed, micro = [*self.fixed(), *kept], self.sizes.training
        gradients, reduction = optimizer.gradients(self), optimizer.reduction(self)
        held = int((1 if self.gpu else _CPU_HEAP) * micro.kept)
        activations = Part("activations", held, remedies.smaller_micro_batches(self))
        freed = [] if self.gpu else [activations]
        # ZeRO-3 keeps its buffers of gradients from step to step, unless what decodes is released.
        stays = self.stage == 3 and (self.keeps or not self.gpu)
        rest = [*fixed, *freed, *([gradients] if stays else []), self.four_bits(on_host=False)]
        gathered = rest if kept else [*rest, self.gathered()]
        exported = [*rest, self.gathered(exact=True)] if self.weights == "int8" else gathered
        # What is computed in addition reads the head in full.
        more = self.config.grpo.baseline == "optimal" or any(f.head(1, self.sizes.vocabulary) for f in self.features)
        at_once = max(self.sizes.largest_linear, self.sizes.largest * more)
        unpacked = Part("unpacked weights", self.dtype * at_once * bool(self.packed))
        generating = [*gathered, *([] if kept else [self.graphs()]), *([] if self.gpu else [self.copy()])]
        unpacks = self.weights == "int8" or (self.weights == "unmerged" and self.packed)  # where no kernel multiplies
        generating.append(Part("unpacked weights", self.dtype * self.sizes.largest_linear * bool(unpacks)))
        generating = [*generating, self.decoding(self.usable - self.beside_cache(generating))]
        if not kept:
            generating.append(self.cache(self.beside_cache(generating)))
        # ZeRO-3 holds at most this number of elements whole on a rank, or all of a small model.
        fetched = self.dtype * min(self.n, max(self.live, self.sizes.largest)) if self.sharded else 0
        fetches = Part("fetched weights", fetched, remedies.less_fetched(self))
        training = [*fixed, gradients, self.four_bits(), unpacked, fetches, activations]
        updating = [*fixed, *freed, gradients, self.four_bits()]
        layer = max(micro.layers, reduction.bytes) if self.t > self.bucket else micro.layers
        named = {
            "generation": generating,
            "loss": [*training, Part("LM head", micro.head, remedies.smaller_micro_batches(self, recomputed=True))],
            "backward": [*training, Part("one layer", layer, remedies.smaller_micro_batches(self, recomputed=True))],
            "reduction": [*updating, reduction],
            "optimizer step": [*updating, *optimizer.stepping(self)],
            # A GPU's weights are copied to the host and written from there.
            "export": [*exported, *([] if self.gpu else [self.export])],
        }
        return tuple(Phase(name, tuple(p for p in self.held(parts) if p.bytes)) for name, parts in named.items())

    @property
    def host(self) -> Phase:
        """What a rank with a GPU has in host memory."""
        states = optimizer.states(self) if self.offloads else optimizer.parked(self) if self.parks else []
        # They are read tensor by tensor, into pinned memory that torch keeps. Those that are trained move into one.
        pinned = int(self.sizes.padded * (1 / self.ranks + self.second))
        hosted = self.dtype * pinned + power_of_two(self.dtype * self.owned)
        weights = Part("weights", hosted if self.hosted else 0, "more ranks")
        parts = [self.process, self.reward_models(on_host=True), weights, self.four_bits(on_host=True), *states]
        parts += [] if self.refers else [self.reference()]
        inputs = Part("layer inputs", self.sizes.training.hosted, remedies.smaller_micro_batches(self, recomputed=True))
        parts += [*self.feature_parts(on_host=True), self.export, self.copy(), self.pictures, inputs]
        return Phase("its host", tuple(part for part in parts if part.bytes and self.gpu))

    def fixed(self) -> list[Part]:
        """Return the parts that are on the device all the time."""
        weights = 0 if self.hosted else self.dtype * (self.n - self.packed)
        parts = [
            Part("weights", weights // (self.ranks if self.stage == 3 else 1), remedies.fewer_weights(self)),
            Part("second shard", int(weights * self.second), remedies.ONE_SHARD), self.reward_models(on_host=False),
            *self.feature_parts(on_host=False), Part("tower", self.dtype * self.tower),
            *([self.reference()] if self.refers else []),
        ]  # fmt: skip
        if self.gpu:
            runtime = [Part("runtime", CUDA_CONTEXT_BYTES), Part("NCCL", NCCL_BYTES if self.ranks > 1 else 0)]
            return [*runtime, *parts, *([] if self.offloads or self.parks else optimizer.states(self))]
        on_host = [self.reward_models(on_host=True), *self.feature_parts(on_host=True)]
        return [self.process, *parts, *on_host, *optimizer.states(self), self.reference()]

    def four_bits(self, *, on_host: bool | None = None) -> Part:
        """Return the packed weights; if asked, those that wait on this side while decoding has them in full."""
        waits = self.gpu and not self.keeps and self.weights != "unmerged"
        elsewhere = on_host is not None and on_host != waits
        size = _PACKED_BYTES * self.sizes.linear + self.sizes.tables  # and a scale for each token
        return Part("packed weights", 0 if elsewhere or not self.packed else int(size))

    def held(self, parts: list[Part]) -> list[Part]:
        """Return the parts and, on a GPU, one more for what torch's allocator holds in addition to them."""
        # The cache is allocated at once, from memory that is free.
        tensors = sum(part.bytes for part in parts if part.name not in (*_NOT_OF_TENSORS, "keys and values"))
        return [*parts, Part("allocator", int(_FRAGMENTS * tensors) if self.gpu else 0)]

    def beside_cache(self, parts: list[Part]) -> int:
        """Return the bytes of all parts except the cache, and of what the allocator holds in addition to them."""
        return sum(part.bytes for part in self.held([part for part in parts if part.name != "keys and values"]))

    def reward_models(self, on_host: bool) -> Part:
        weights = sum(model.bytes_of(self.ranks) for model in self.models if model.on_host == on_host)
        return Part("reward models", weights, "zero_stage 3 in kwargs of rewards")

    def gathered(self, *, exact: bool = False) -> Part:
        """Return the weights that `View` gathers: all, those with adapters, or on a GPU queries, keys and values; in
        eight bits some, and one of these in full."""
        lora, linear = self.config.lora, self.sizes.linear
        if self.weights == "int8" and not exact:
            whole = self.n - self.sizes.eight_bits + self.sizes.largest_linear if self.sharded else 0
            return Part("gathered weights", self.sizes.eight_bits + self.dtype * whole)
        beside = self.sizes.attending if self.gpu and self.weights == "merged" else 0
        changed = max(linear, self.packed) if lora.rank and self.weights != "unmerged" else beside
        elements = self.n if self.sharded else changed
        can = lora.rank and self.weights == "merged" and self.config.engine.zero_stage != 3
        return Part("gathered weights", self.dtype * elements, "rollout.weights unmerged" if can else "")

    def reference(self) -> Part:
        """Return the reference, sharded over the ranks, and the float32 average that it may be the rounding of. With
        new adapters, it takes no memory of its own."""
        grpo, each = self.config.grpo, self.n // self.ranks
        loaded = grpo.has_reference and (not self.config.lora.rank or is_adapter(self.config.policy.model))
        average = 4 * each if grpo.averages_reference and self.dtype == 2 else 0
        weights = self.dtype * (self.sizes.padded // self.ranks if self.gpu and not self.refers else each)
        return Part("reference", weights + average if loaded else 0, "grpo.beta 0, more ranks")

    def copy(self) -> Part:
        """Return the copy from which a checkpoint is written; if there is no memory for it, training waits instead."""
        grpo = self.config.grpo
        of_reference = (4 if grpo.averages_reference else self.dtype) * self.n // self.ranks if grpo.ref_every else 0
        return Part("copy to save", 12 * self.owned + of_reference if self.config.checkpoint.copies else 0, fewest=0)

    def feature_parts(self, on_host: bool) -> list[Part]:
        return [feature.part(self, on_host) for feature in self.features]

    @property
    def laid_out(self) -> int:
        """Number of sequences for which decoding has memory."""
        return self.kept_slots if self.keeps else self.slots

    def graphs(self) -> Part:
        """Return the captured steps, and the logits that all of them write to."""
        size = bytes_of(self.laid_out) + self.laid_out * self.sizes.vocabulary * self.dtype
        paged = self.config.rollout.decoder == "paged"
        return Part("CUDA graphs", size if self.gpu and paged else 0, remedies.fewer_slots(self))

    @property
    def carried(self) -> int:
        """Bytes of the states of all slots, and of the sequences that wait for one or for an answer."""
        return rows_for(self.laid_out, waiting=self.config.rollout.has_turns) * self.sizes.state_bytes

    def cache(self, used: int = 0) -> Part:
        """Return the pages that the longest completions fill in all slots, and their states; if the cache is not kept,
        at most a share of what is free after `used` bytes."""
        rollout = self.config.rollout
        needed = (self.laid_out * (self.pages + 1) + 2) * self.bytes_of_page + self.carried
        least = (self.pages + 3) * self.bytes_of_page + self.carried // self.laid_out
        if rollout.cache_gb is not None:
            needed = least = min(needed, int(rollout.cache_gb * 2**30))
        if self.keeps:
            return Part("keys and values", needed, f"rollout.keep_cache off, {remedies.fewer_slots(self)}")
        if self.gpu and rollout.cache_gb is None:
            least = min(needed, int(least / GPU_SHARE))
            needed = min(needed, max(least, int(GPU_SHARE * (self.usable - used))))
        remedy = remedies.shorter_completions(self) if rollout.cache_gb is None else "rollout.cache_gb null"
        return Part("keys and values", needed, remedy, min(least, needed))

    def choosing(self) -> int:
        """Return the bytes for choosing a token in every slot: logits and, in torch, weights and sums, which filters
        also sort (measured). Kernels, which run on GPUs and for float32 without filters, need only logits and masks."""
        rollout = self.config.rollout
        filters = rollout.top_k or rollout.top_p < 1
        in_torch = 60 if filters else 24 if self.dtype == 2 or rollout.min_p else 0
        # Booleans, and 64 bits for every eight of them.
        masks = 3 if rollout.logprobs == "mask" else 0
        return self.laid_out * self.sizes.vocabulary * (self.dtype + masks + (0 if self.gpu else in_torch))

    def decoding(self, free: int) -> Part:
        """Return the larger of a prefill and a decode step, which runs once before it is captured. These and the cache
        share `free` bytes."""
        tokens = prefill_that_fits(self.config.rollout.prefill_tokens, self.gpu, self.sizes.reading, free)
        prefill = min(tokens, self.batch.prompts_per_rank * self.prompt) * self.sizes.reading
        choosing = self.choosing()
        remedy = remedies.shorter_prefills(tokens) if prefill > choosing else remedies.fewer_slots(self)
        return Part("decoding", max(prefill, choosing), remedy)
