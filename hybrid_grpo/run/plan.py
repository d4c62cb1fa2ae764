"""What a GRPO run takes, said before its weights are read: bytes by part and phase, and a rough time of a step.

Arithmetic over the configuration, the model's configuration and the number of ranks. What the layers of a model keep
for backward is seen from a run without data (dry_run.py); what DeepSpeed and the decoder hold follows from their code,
which the comments name. Nothing is learned from runs before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import MicroBatch
from hybrid_grpo.data.packing import pack, pad, token_budget
from hybrid_grpo.generation.loop import PAGE, PREFILL_TOKENS
from hybrid_grpo.model.loading import load_config
from hybrid_grpo.model.view import BUCKET_ELEMENTS
from hybrid_grpo.rewards.models.reward import RewardModel
from hybrid_grpo.run.dry_run import MALLOC_KEEPS, DryRun, Footprint, NeedsData
from hybrid_grpo.run.hardware import Hardware

REFUSED_ABOVE = 1.15
"""A run is refused when it needs this much more than is free; between that and 1 it is warned about."""
CUDA_CONTEXT_BYTES = 550 << 20
"""CUDA's context and the workspaces of its libraries: what `nvidia-smi` shows of a process beyond what torch reserved.
About what data-center GPUs take; the one number here that is not measured."""
PROCESS_GROWTH_BYTES = 90 << 20
"""What a process grows by after the plan beside everything below: engine, process group, C kernels, BLAS. With the
quickstart's model 467 MiB were resident before the engine was made, and 540 beside activations at the end. Rounded."""
_MAX_LIVE, _PREFETCH, _BUCKET = 10**9, 5 * 10**7, 5 * 10**8
"""DeepSpeed's defaults, in elements: gathered weights alive, weights fetched ahead, one bucket of gradients."""
_MOMENTS, _FLOAT = 8, 4
_HOLES = 0.5
"""Of what is alive in a heap, what holes between its blocks take beside it: the fifty-percent rule (Knuth, The Art of
Computer Programming, volume 1, section 2.5). Runs showed 0.1 to 1.1: see docs/log.md."""


@dataclass(frozen=True)
class Part:
    """Memory that one thing takes."""

    name: str
    bytes: int
    remedy: str = ""
    """Settings that make it smaller."""
    least: int | None = None
    """Bytes that it can do with; not given: all of them."""


@dataclass(frozen=True)
class Phase:
    """The parts that are there at the same time."""

    name: str
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """All parts together."""
        return sum(part.bytes for part in self.parts)

    @property
    def least(self) -> int:
        """The bytes without which the phase cannot be run."""
        return sum(part.bytes if part.least is None else part.least for part in self.parts)


@dataclass(frozen=True)
class Sizes:
    """What has to be known of a model."""

    parameters: int
    trained: int
    """Parameters that have gradients and optimizer states: all, or those of the adapters."""
    largest: int
    """Elements of the largest tensor."""
    small: int
    """Parameters in tensors that malloc does not give back to the system; see `MALLOC_KEEPS`."""
    active: int
    """Parameters that one token is multiplied with."""
    vocabulary: int
    token_bytes: int
    """Keys and values of one token."""
    training: Footprint
    """One micro-batch."""
    scoring: int
    """Bytes of a forward that scores one micro-batch without gradients."""
    prefill: int
    """Bytes of a forward that reads prompts."""
    rewards: int = 0
    """Bytes of the reward models on the device."""
    rewards_host: int = 0
    """Bytes of those in host memory, or of this rank's shards of them."""


@dataclass(frozen=True)
class Plan:
    """Memory of one rank, and the time of a step."""

    hardware: Hardware
    sizes: Sizes
    phases: tuple[Phase, ...]
    """On the device, which on a CPU is the host."""
    host: tuple[Part, ...]
    """In host memory where the device is a GPU."""
    seconds: dict[str, float]
    """By stage; at best, since matrices of a model are smaller than those that speed is measured with."""
    tokens: dict[str, int]
    """Most tokens of a step, over all ranks."""

    @property
    def peak(self) -> Phase:
        """The largest phase."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def measurable(self) -> int:
        """The peak as a run measures it: resident memory on a CPU; on a GPU what torch allocates, without CUDA."""
        return self.peak.bytes - (CUDA_CONTEXT_BYTES if self.hardware.on_gpu else 0)

    def __str__(self) -> str:
        parts = sorted(self.peak.parts, key=lambda part: -part.bytes)
        largest = ", ".join(f"{gib(part.bytes)} {part.name}" for part in parts[:3])
        free = gib(self.hardware.device_bytes)
        return f"about {gib(self.peak.bytes)} GiB a rank ({self.peak.name}: {largest}, ...), {free} GiB are free"


def largest_micro_batch(
    config: TrainConfig, batch: BatchPlan, prompt: int, *, packs: bool, on_gpu: bool, gradients: bool
) -> MicroBatch:
    """Of a rollout whose prompts and completions all have the longest length.

    Args:
        batch: the batch equation.
        prompt: tokens of the longest prompt.
        packs: whether the model takes micro-batches without padding.
        on_gpu: where it runs.
        gradients: those of training, else those that are scored.
    """
    group = batch.num_generations
    prompts = batch.prompts_per_rank // (batch.num_minibatches if gradients else 1)
    # No two prompts are the same.
    prompt_ids = [ids for number in range(prompts) for ids in [[number] * prompt] * group]
    completion_ids = [[0] * config.rollout.max_completion_tokens] * len(prompt_ids)
    budget = token_budget(config.policy, on_gpu=on_gpu, gradients=gradients)
    given = prompt_ids, completion_ids, range(len(prompt_ids)), budget
    cpu = torch.device("cpu")
    parts = pack(*given, cpu, share=config.policy.shared_prefix) if packs else pad(*given, cpu)
    return max(parts, key=lambda part: part.input_ids_bS.numel())


def foresee(
    config: TrainConfig, batch: BatchPlan, prompt: int, hardware: Hardware, models: Sequence[RewardModel] = ()
) -> Plan | None:
    """The plan of a run whose longest prompt has so many tokens; None where the model cannot run without data.

    Args:
        models: of its rewards, not loaded yet; of them the weights are counted.

    Raises:
        UserError: the model has no configuration, or not the attention or the adapters that are asked for.
    """
    try:
        sizes = measure(config, load_config(config.policy.model), batch, prompt, on_gpu=hardware.on_gpu)
    except NeedsData:
        return None
    sizes = replace(
        sizes,
        rewards=sum(model.bytes_of(batch.world_size) for model in models if not model.on_host),
        rewards_host=sum(model.bytes_of(batch.world_size) for model in models if model.on_host),
    )
    return plan(config, sizes, batch, prompt, hardware)


def measure(config: TrainConfig, model_config: Any, batch: BatchPlan, prompt: int, *, on_gpu: bool) -> Sizes:
    """See what has to be known of a model, without its weights.

    Args:
        model_config: transformers configuration.
        batch: the batch equation.
        prompt: tokens of the longest prompt.
        on_gpu: where it is to run.
    """
    dry = DryRun(model_config, config.policy, config.lora)
    parameters = list(dry.model.parameters())
    training, scored = (
        largest_micro_batch(config, batch, prompt, packs=dry.packs, on_gpu=on_gpu, gradients=gradients)
        for gradients in (True, False)
    )
    layers, scoring = dry.inference(scored)
    prefill_tokens = config.rollout.prefill_tokens or PREFILL_TOKENS["cuda" if on_gpu else "cpu"]
    read = min(prefill_tokens, batch.prompts_per_rank * prompt)
    return Sizes(
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        largest=max(p.numel() for p in parameters),
        small=sum(p.numel() for p in parameters if p.nbytes < MALLOC_KEEPS),
        active=dry.active_parameters(),
        vocabulary=dry.model.get_output_embeddings().weight.shape[0],
        token_bytes=dry.cache_bytes(paged=config.rollout.decoder == "paged"),
        training=dry.training(training),
        scoring=scoring,
        # What a forward takes is in proportion to its tokens.
        prefill=layers * read // scored.input_ids_bS.numel(),
    )


def plan(config: TrainConfig, sizes: Sizes, batch: BatchPlan, prompt: int, hardware: Hardware) -> Plan:
    """Memory by part and phase, and time by stage.

    Args:
        config: the run's settings.
        sizes: those of its model; see `measure`.
        batch: the batch equation.
        prompt: tokens of the longest prompt.
        hardware: a rank's device and host.
    """
    memory = _Memory(config, sizes, batch, prompt, hardware)
    phases = memory.phases()
    longest = prompt + config.rollout.max_completion_tokens
    rows = batch.world_size * batch.prompts_per_rank * batch.num_generations
    tokens = {"sampled": rows * config.rollout.max_completion_tokens, "trained": rows * longest * batch.num_iterations}
    return Plan(hardware, sizes, phases, memory.host(), _seconds(config, sizes, batch, prompt, hardware), tokens)


class _Memory:
    """The parts of a rank's memory. Elements, not bytes, are counted by `n` (of the model) and `t` (trained)."""

    def __init__(self, config: TrainConfig, sizes: Sizes, batch: BatchPlan, prompt: int, hardware: Hardware) -> None:
        self.config, self.sizes, self.batch, self.prompt, self.hardware = config, sizes, batch, prompt, hardware
        self.stage = config.engine.zero_stage
        self.ranks = batch.world_size
        self.dtype = 2 if config.policy.dtype == "bfloat16" else 4
        self.n, self.t = sizes.parameters, sizes.trained
        self.owned = -(-self.t // self.ranks) if self.stage else self.t
        """Elements that this rank steps."""
        self.sharded = self.stage == 3 and self.ranks > 1
        zero = config.engine.deepspeed.get("zero_optimization", {})
        self.bucket = int(float(zero.get("reduce_bucket_size", _BUCKET)))
        self.offloads = config.engine.offload_optimizer

    def phases(self) -> tuple[Phase, ...]:
        """Those of a step that come after the first optimizer step, when all states are there, and the export."""
        always = [self.runtime(), self.weights(), self.reward_models()]
        if not self.offloads or not self.hardware.on_gpu:
            always += self.states()
        if not self.hardware.on_gpu:
            always += self.reference()
        micro = self.sizes.training
        training = [*always, self.gradients()]
        activations = Part("activations", micro.kept, _SMALLER_MICRO_BATCH)
        # The heap of a process on a CPU keeps its largest extent: small blocks of training, and holes between them.
        small, loose = (0, 0) if self.hardware.on_gpu else (micro.small + self.fetched_small(), self.loose_gradients())
        # Larger blocks of activations leave holes as well: malloc looks for room in the heap before it asks the system.
        large = 0 if self.hardware.on_gpu else micro.kept - micro.kept_small
        holes = int(_HOLES * (small + large + loose))
        training.append(Part("holes in the heap", holes, _SMALLER_MICRO_BATCH))
        kept = [Part("heap of training", small + holes, _SMALLER_MICRO_BATCH)]
        idle = [Part("heap of training", small + loose + holes, _SMALLER_MICRO_BATCH)]
        generation = [*always, *idle, self.buffers(), self.gather(), self.cache(), self.decoding()]
        reduction = self.reduction()
        if self.t > self.bucket:
            backward = [activations, Part("one layer", max(micro.layers, reduction.bytes), _SMALLER_MICRO_BATCH)]
        else:
            backward = [activations, Part("one layer", micro.layers, _SMALLER_MICRO_BATCH)]
        phases = [
            Phase("generation", tuple(generation)),
            Phase("loss", (*training, self.fetched(), activations, Part("LM head", micro.head))),
            Phase("backward", (*training, self.fetched(), *backward)),
            Phase("reduction", (*always, self.gradients(), *kept, reduction)),
            Phase("optimizer step", (*always, self.gradients(), *kept, self.stepping())),
            Phase("export", (*always, *idle, self.buffers(), self.gather(), self.export())),
        ]
        if self.config.grpo.beta and not self.config.lora.rank:
            scoring = Part("forward", self.sizes.scoring, "policy.micro_batch_tokens")
            phases.insert(1, Phase("reference", (*always, *idle, self.buffers(), self.prefetched(), scoring)))
        return tuple(replace(phase, parts=tuple(p for p in phase.parts if p.bytes)) for phase in phases)

    def host(self) -> tuple[Part, ...]:
        """Host memory of a rank with a GPU."""
        if not self.hardware.on_gpu:
            return ()
        runtime = Part("runtime", self.hardware.process_bytes + PROCESS_GROWTH_BYTES)
        rewards = Part("reward models", self.sizes.rewards_host)
        parts = [runtime, rewards, *self.reference(), *(self.states() if self.offloads else []), self.export()]
        return tuple(part for part in parts if part.bytes)

    def runtime(self) -> Part:
        """Python, torch, and CUDA or the libraries of a CPU."""
        if self.hardware.on_gpu:
            return Part("runtime", CUDA_CONTEXT_BYTES)
        return Part("runtime", self.hardware.process_bytes + PROCESS_GROWTH_BYTES)

    def weights(self) -> Part:
        """The policy's."""
        return Part("weights", self.dtype * self.n // (self.ranks if self.stage == 3 else 1), _MORE_SHARDS)

    def reward_models(self) -> Part:
        """Their weights; on a CPU also those that would be in host memory."""
        host = 0 if self.hardware.on_gpu else self.sizes.rewards_host
        return Part("reward models", self.sizes.rewards + host, "rewards: kwargs zero_stage 3 or dtype")

    def states(self) -> list[Part]:
        """Adam's; with offloading also the gradients that it reads, and what is copied back."""
        # Stages 1 and 2 clone their partition in any type, 0 has none, and 3 steps float32 weights in place.
        masters = _FLOAT if self.stage in (1, 2) or (self.stage == 3 and (self.dtype == 2 or self.offloads)) else 0
        offloaded = {0: 0, 1: _FLOAT + self.dtype, 2: _FLOAT + self.dtype, 3: 2 * _FLOAT}[self.stage]
        optimizer = [
            Part("float32 masters", masters * self.owned, _FEWER_STATES),
            Part("Adam's moments", _MOMENTS * self.owned, _FEWER_STATES),
        ]
        return [*optimizer, Part("offloaded gradients", offloaded * self.owned if self.offloads else 0, _MORE_SHARDS)]

    def buffers(self) -> Part:
        """Gradients of stage 3 keep their room: the shards, and the bucket in which they are reduced."""
        return self.gradients() if self.stage == 3 else Part("gradients", 0)

    def gradients(self) -> Part:
        """What is there from the first backward to the optimizer step."""
        # torch.empty of the whole bucket: on a CPU what is never written to takes nothing.
        bucket = self.bucket if self.hardware.on_gpu else min(self.t, self.bucket)
        # Stage 1 reduces what it has added up in float32.
        staged = bucket * (_FLOAT if self.stage == 1 else self.dtype)
        shards = 0 if self.offloads else _FLOAT * self.owned
        bytes_ = shards if self.stage == 0 else shards + staged
        return Part("gradients", bytes_, f"{_MORE_SHARDS}, {_SMALLER_BUCKET}")

    def reduction(self) -> Part:
        """Copies while a bucket is reduced: stage 3 lays the shards of all ranks side by side, gloo copies them."""
        elements = min(self.t, self.bucket)
        copies = {0: 0, 1: self.dtype, 2: 0, 3: self.dtype}[self.stage]
        # Summed in the type of the weights, kept in float32.
        own = _FLOAT * elements // self.ranks if self.stage == 3 and self.dtype == 2 else 0
        gloo = self.dtype * elements if self.ranks > 1 and not self.hardware.on_gpu else 0
        return Part(
            "reduction", copies * elements + own + gloo, "engine.deepspeed.zero_optimization.reduce_bucket_size"
        )

    def gather(self) -> Part:
        """Whole weights for generation; adapters are merged into a copy."""
        if not (self.sharded or self.config.lora.rank):
            return Part("gathered weights", 0)
        # Of a bucket of view.py there are this rank's shards and those of all.
        bucket = min(self.n, max(BUCKET_ELEMENTS, self.sizes.largest)) if self.sharded else 0
        return Part("gathered weights", self.dtype * (self.n + bucket + bucket // self.ranks))

    def fetched(self) -> Part:
        """Weights that ZeRO-3 holds whole on a rank: at most so many, and those of a small model all of them."""
        elements = min(self.n, _MAX_LIVE) if self.sharded else 0
        return Part(
            "fetched weights", self.dtype * elements, "engine.deepspeed.zero_optimization.stage3_max_live_parameters"
        )

    def fetched_small(self) -> int:
        """Bytes of those that a heap keeps."""
        return self.dtype * self.sizes.small if self.sharded else 0

    def loose_gradients(self) -> int:
        """Bytes of gradients that come and go tensor by tensor, in the heap: those of stage 0."""
        return _FLOAT * self.sizes.small if self.stage == 0 else 0

    def prefetched(self) -> Part:
        """Weights of the reference on the device: used once and let go, others fetched meanwhile."""
        elements = min(self.n, _PREFETCH + 2 * self.sizes.largest) if self.sharded or self.hardware.on_gpu else 0
        return Part("fetched weights", self.dtype * elements)

    def reference(self) -> list[Part]:
        """In host memory, sharded over the ranks; of adapters it is the model without them."""
        loaded = self.config.grpo.beta and not self.config.lora.rank
        return [Part("reference", self.dtype * self.n // self.ranks, "grpo.beta 0, more ranks")] if loaded else []

    def cache(self) -> Part:
        """Pages that the longest completions of all slots fill, or what there is for them."""
        rollout, page = self.config.rollout, PAGE["cuda" if self.hardware.on_gpu else "cpu"]
        rows = self.batch.prompts_per_rank * rollout.num_generations
        slots, longest = min(rollout.max_slots, rows), self.prompt + rollout.max_completion_tokens
        bytes_of_page = page * self.sizes.token_bytes
        needed = (slots * (-(-longest // page) + 1) + 2) * bytes_of_page
        least = (-(-longest // page) + 3) * bytes_of_page
        if not self.hardware.on_gpu:
            # Pages that nobody writes to take no memory, and a group shares those of its prompt.
            shared = self.prompt // page
            own = -(-longest // page) - shared
            needed = (slots * own + -(-slots // rollout.num_generations) * shared) * bytes_of_page
        if rollout.cache_gb is not None:
            needed = min(needed, int(rollout.cache_gb * 2**30))
            least = needed
        elif self.hardware.on_gpu:
            needed = min(needed, max(least, int(0.9 * (self.hardware.device_bytes - self.resident()))))
        return Part("keys and values", needed, "rollout.cache_gb, rollout.max_slots", min(least, needed))

    def resident(self) -> int:
        """Bytes on a GPU when generation begins."""
        parts = [self.runtime(), self.weights(), self.reward_models(), self.buffers(), self.gather()]
        return sum(part.bytes for part in (parts if self.offloads else parts + self.states()))

    def decoding(self) -> Part:
        """The larger of a prefill and of choosing tokens: logits, log-probabilities, probabilities, their sums."""
        rollout = self.config.rollout
        slots = min(rollout.max_slots, self.batch.prompts_per_rank * rollout.num_generations)
        filters = 16 if rollout.top_k or rollout.top_p < 1 else 0
        logits = slots * self.sizes.vocabulary * (self.dtype + 18 + filters)
        return Part("decoding", max(self.sizes.prefill, logits), "rollout.max_slots, rollout.prefill_tokens")

    def stepping(self) -> Part:
        """Gradients in one float32 tensor, and the denominator of Adam."""
        adam, gpu = self.config.engine.adam, self.hardware.on_gpu
        if gpu and self.offloads:
            return Part("step", 0)
        # Stages 1 and 2 have added up in float32 where the weights are not, in one tensor.
        whole = {0: min(self.t, self.bucket), 1: self.owned, 2: self.owned, 3: self.owned}[self.stage]
        flat = 0 if self.stage in (1, 2) and self.dtype == 2 else _FLOAT * whole
        if adam == "deepspeed":
            return Part("step", flat, _MORE_SHARDS)
        # torch takes all tensors together on a GPU, and on a CPU one after the other, with two temporaries.
        tensor = self.owned if gpu or self.stage else self.sizes.largest
        return Part("step", flat + (_FLOAT if gpu else 2 * _FLOAT) * tensor, _MORE_SHARDS)

    def export(self) -> Part:
        """The copy that is written to the model's folder."""
        return Part("copy to write", self.dtype * self.n)


_SMALLER_MICRO_BATCH = "policy.micro_batch_tokens, policy.gradient_checkpointing"
_SMALLER_BUCKET = "engine.deepspeed.zero_optimization.reduce_bucket_size"
_FEWER_FETCHED = "engine.deepspeed.zero_optimization.stage3_max_live_parameters"
_MORE_SHARDS = "engine.zero_stage, more ranks"
_FEWER_STATES = f"{_MORE_SHARDS}, engine.offload_optimizer"


def _seconds(config: TrainConfig, sizes: Sizes, batch: BatchPlan, prompt: int, hardware: Hardware) -> dict[str, float]:
    """Of the longest possible rollout: products at full speed, or weights and cache read once for every step."""
    rollout, prompts = config.rollout, batch.prompts_per_rank
    rows, longest = prompts * batch.num_generations, prompt + rollout.max_completion_tokens
    product = 2 * sizes.active / hardware.flops
    slots = min(rollout.max_slots, rows)
    weights = (2 if config.policy.dtype == "bfloat16" else 4) * sizes.active
    read = (weights + slots * (prompt + rollout.max_completion_tokens / 2) * sizes.token_bytes) / hardware.bandwidth
    steps = rows / slots * rollout.max_completion_tokens
    generation = prompts * prompt * product + steps * max(read, slots * product)
    # Backward is twice a forward, and checkpointing runs the forward once more.
    passes = (4 if config.policy.gradient_checkpointing else 3) * batch.num_iterations
    seconds = {"generation": generation, "training": rows * longest * product * passes}
    if config.grpo.beta:
        seconds["reference"] = rows * longest * product
    return seconds


def lines(plan: Plan) -> list[str]:
    """The plan as text: a table of parts and phases in GiB, what is in host memory, tokens and seconds of a step."""
    hardware, sizes = plan.hardware, plan.sizes
    names = list(dict.fromkeys(part.name for phase in plan.phases for part in phase.parts))
    width = max(len(name) for name in [*names, "all"])
    columns = [max(6, len(phase.name)) for phase in plan.phases]

    def row(name: str, cells: list[str]) -> str:
        return f"  {name:{width}}  " + "  ".join(f"{c:>{w}}" for c, w in zip(cells, columns, strict=True))

    table = [row("", [phase.name for phase in plan.phases])]
    for name in names:
        cells = [sum(part.bytes for part in phase.parts if part.name == name) for phase in plan.phases]
        table.append(row(name, [gib(cell) if cell else "-" for cell in cells]))
    table.append(row("all", [gib(phase.bytes) for phase in plan.phases]))
    free = f", {gib(hardware.device_bytes)} of them free" if hardware.device_bytes < 1 << 60 else ""
    host = " + ".join(f"{gib(part.bytes)} {part.name}" for part in plan.host)
    times = ", ".join(f"{name} {seconds:.3g}" for name, seconds in plan.seconds.items())
    return [
        f"model: {sizes.parameters:,} parameters, {sizes.trained:,} of them trained",
        f"memory: GiB of a rank on {hardware.name}{free}; the peak is {gib(plan.peak.bytes)}, in {plan.peak.name}",
        *table,
        *([f"host memory: {host} = {gib(sum(part.bytes for part in plan.host))} GiB a rank"] if plan.host else []),
        "tokens: at most " + " and ".join(f"{count:,} {what}" for what, count in plan.tokens.items()) + " a step",
        f"time: roughly {sum(plan.seconds.values()):.3g} s a step at full speed and full length ({times})",
    ]


def shortage(plan: Plan) -> str | None:
    """A warning where a run needs more memory than is free; None where it fits.

    Raises:
        UserError: it clearly does not fit: the line names the largest parts, and the settings that shrink them.
    """
    hardware = plan.hardware
    worst = max(plan.phases, key=lambda phase: phase.least)
    where = "the GPU" if hardware.on_gpu else "the host"
    needs = [
        (worst.name, worst.parts, worst.least, hardware.device_bytes, where),
        ("its host", plan.host, sum(part.bytes for part in plan.host), hardware.host_bytes, "the host"),
    ]
    for name, parts, least, free, where in needs:
        if least <= free:
            continue
        largest = sorted((p for p in parts if p.remedy), key=lambda part: -part.bytes)[:3]
        remedies = dict.fromkeys(setting for part in largest for setting in part.remedy.split(", "))
        message = (
            f"{name} needs {gib(least)} GiB a rank and {gib(free)} are free on {where}:"
            f" {', '.join(f'{gib(part.bytes)} of {part.name}' for part in largest or parts)};"
            f" change {', '.join(remedies) or 'the machine'}"
        )
        if least > REFUSED_ABOVE * free:
            raise UserError(f"the run does not fit: {message}")
        return message
    return None


def gib(bytes_: int) -> str:
    """Bytes in GiB, with three digits."""
    return f"{bytes_ / 2**30:.1f}" if bytes_ >= 2**30 else f"{bytes_ / 2**30:.2f}"
