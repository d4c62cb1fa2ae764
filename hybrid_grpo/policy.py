"""The policy: the model that samples, scores and is trained, and its learning rate."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.profiler import record_function

from hybrid_grpo import engine as engines
from hybrid_grpo.config import EngineConfig, LoraConfig, PolicyConfig, RolloutConfig
from hybrid_grpo.config.adapters import base_of, is_adapter
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.data.batch import Completion, MicroBatch, Prompt, Rollout, measured
from hybrid_grpo.data.packing import fillers, pack, pad, token_budget
from hybrid_grpo.data.pictures import ImageStore, sight_of
from hybrid_grpo.distributed.gradients import GradientCheck
from hybrid_grpo.distributed.ranks import all_reduce, neighbors, rank
from hybrid_grpo.engine import StepResult
from hybrid_grpo.generation import (
    Callbacks,
    Journal,
    OnFinish,
    OnStep,
    Request,
    Sampling,
    ShouldStop,
    Stats,
    Turns,
    Workspace,
    complete_rest,
)
from hybrid_grpo.generation.rollout import attention_of, complete, requests_of, sampling_of
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.export import Original, save_model, save_tokenizer
from hybrid_grpo.model.flops import Cost
from hybrid_grpo.model.gathered_weights import Weights, meta_copy
from hybrid_grpo.model.limits import vocabulary_of
from hybrid_grpo.model.loading import dequantized, load_config, load_model, plain_attention, training_attention
from hybrid_grpo.model.logprobs import HeadFunction, LogprobModel
from hybrid_grpo.model.lora import Adapters
from hybrid_grpo.model.reading import TEXT, Reading
from hybrid_grpo.model.routing import described, replays
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.model.towers import lacks_towers

_COUNTERS = ("optimizer_steps", "skipped_steps", "lr_scale")


def learning_rate(config: PolicyConfig, step: int, total: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`: linear warm-up, then the schedule's decay to 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return config.lr * shape[config.lr_schedule]


def _on_host(ids: Tensor) -> AbstractContextManager[Any]:
    # What is saved between checkpointed layers is what goes into each.
    return save_on_cpu(pin_memory=True) if ids.is_cuda else nullcontext()


class Policy:
    """A causal language model inside one DeepSpeed engine, both for sampling and for training.

    `total_steps` counts the optimizer steps of the whole run. `decoder` names the decoder that samples from the model
    and `weights` what it reads (see `RolloutConfig`). With a `lora` of rank above 0, adapters are trained instead of
    the weights, and `seed` initializes them. With a `workspace`, the memory for decoding and for gathered weights is
    kept between rollouts. `album` has the pictures of prompts. `turns` answers the model's turns in a completion;
    without it, every completion is a single turn. `journal` keeps finished completions.

    Attributes:
        lr_scale: a factor on the schedule's learning rate, which the guard lowers after a rollback.
        cost: the cost of one token; see `Cost`.
        frozen: names of trained tensors that no gradient reaches, after the step at which this is checked.
        reading: how it reads pictures and recorded experts.
        vocabulary: the number of ids, the first of the model's, that it samples and that its softmax is over.
        packed: whether its frozen weights are in four bits.
        experts: what training does with experts, as a line for the user; None without experts.
    """

    lr_scale = 1.0
    frozen: Sequence[str] = ()
    reading = TEXT
    _group: Any = None

    def __init__(
        self, policy: PolicyConfig, engine: EngineConfig, tokenizer: Any, total_steps: int,
        decoder: Literal["paged", "transformers"] = "paged", lora: LoraConfig | None = None, seed: int = 0,
        workspace: Workspace | None = None, album: ImageStore | None = None, turns: Turns | None = None,
        journal: Journal | None = None, weights: Weights = "merged",
    ) -> None:  # fmt: skip
        self.config, self.tokenizer, self.total_steps = policy, tokenizer, total_steps
        self.optimizer_steps = self.skipped_steps = 0
        self.workspace, self.turns, self.journal, self._album = workspace, turns, journal, album
        self.vocabulary = vocabulary_of(tokenizer, load_config(policy.model))
        config = engines.policy_config(policy, engine)
        attention = training_attention(policy)
        self.packs, self._group = attention == ATTENTION, neighbors(split := engine.sequence_parallel)
        heads = getattr(load_config(policy.model).get_text_config(), "num_attention_heads", split)
        sees = album is not None and not album.empty
        refuse(
            split > 1 and (sees or not self.packs or heads % split > 0),
            f"engine.sequence_parallel {split} needs packed rows of text, and must divide the {heads} attention heads"
            " of policy.model: give another number, or remove it",
        )
        # An adapter that is trained further is read after its base.
        start = policy if lora is None or not lora.rank else dataclasses.replace(policy, model=base_of(policy.model))
        self.packed = lora is not None and lora.load_in_4bit
        with engines.sharded_loading(config):
            model = load_model(start, attention, four_bits=self.packed)
        self._original = Original(model, base_of(policy.model)) if lacks_towers(model) else None
        view = meta_copy(model, attention_of(decoder) or plain_attention(model.config, policy.attn_implementation))
        self.adapters = Adapters(model, lora, seed) if lora is not None and lora.rank else None
        if self.adapters and is_adapter(policy.model):
            self.adapters.read(policy.model)
        self.cost = Cost.of(model)
        by_layer = self.adapters.by_layer if self.adapters else None
        offloads, keep_view = policy.gradient_checkpointing == "offload", workspace is not None
        trained = LogprobModel(model, self.vocabulary, _on_host if offloads else nullcontext)
        parks = engine.offload_optimizer == "between_steps"
        self.engine = engines.Engine(
            trained, model, view, config, by_layer, keep_view=keep_view, weights=weights, parks=parks
        )
        self.deepspeed_config = self.engine.config
        self.gradients = GradientCheck(trained, self.engine.engine.optimizer, self.engine.stage, self.engine.device)
        sight = sight_of(album, policy, self.engine.device)
        records = self.packs and decoder == "paged" and self._group is None
        self.reading = Reading(sight, replays(model, policy, paged=records))
        self.experts = described(model, self.reading.replays)

    def step(self) -> StepResult:
        """Take one optimizer step. If the gradients are not finite, all ranks skip it and count it as skipped."""
        with record_function("stage/optimizer"):
            result = self.engine.step(self.lr)
            self.frozen = self.gradients.stepped() if result.applied and result.grad_norm else ()
        self.optimizer_steps += 1
        self.skipped_steps += not result.applied
        return result

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer step."""
        return self.lr_scale * learning_rate(self.config, self.optimizer_steps, self.total_steps)

    def state_dict(self) -> dict[str, Any]:
        """The state that the engine's checkpoint does not hold."""
        return {name: getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.gradients.restart()

    def export(self, folder: Path) -> None:
        """Write weights, configuration and tokenizer in Hugging Face format, or the whole checkpoint that the model is
        the text model of. Adapters are merged into the weights, and also written to `adapter/` for peft. Collective."""
        with self.engine.generation(exact=True):
            if rank() == 0:
                # As it was loaded, dropout included.
                config = None if self._original else dequantized(load_config(self.config.model))
                save_model(self.engine.merged(), folder, config, self.config.dtype, self._original)
                save_tokenizer(self.tokenizer, folder)
        if self.adapters is not None:
            whole = self.engine.whole(self.adapters.parameters)
            if rank() == 0:
                self.adapters.save(folder / "adapter", whole)

    def rollout(
        self, prompts: list[Prompt], config: RolloutConfig, stop_ids: tuple[int, ...], *, seed: int, step: int,
        on_finish: OnFinish | None = None, on_step: OnStep | None = None, given: Mapping[int, Completion] | None = None,
        resumed_from: Mapping[int, Sequence[Completion]] | None = None, should_stop: ShouldStop | None = None,
    ) -> tuple[Rollout, Stats]:  # fmt: skip
        """Sample `num_generations` completions of every prompt, except for those that the journal or `given` already
        has; `given` is keyed by random stream (see `requests_of`). `resumed_from` has groups of an earlier step, by the
        index of their prompts: open completions continue. `should_stop` is that of `generate`. Collective."""
        requests, sampling = requests_of(prompts, config, seed, step), sampling_of(config, stop_ids)
        given, goes_on = dict(given or {}), dict[int, Completion]()
        for index, group in (resumed_from or {}).items():
            for key, completion in zip(requests[index].keys, group, strict=True):
                (goes_on if completion.finish == "open" else given)[key] = completion
        with record_function("stage/generate"), self.engine.generation() as view:

            def sample(requests: list[Request], on_finish: OnFinish | None) -> Any:
                callbacks = Callbacks(on_finish, on_step, should_stop=should_stop)
                return self._complete(view, requests, sampling, config, callbacks)

            if self.journal is None:
                groups, stats = complete_rest(requests, given, on_finish, sample, resumed_from=goes_on)
            else:
                groups, stats = self.journal.complete(step, requests, on_finish, sample, given, goes_on)
        rollout = Rollout(prompts, [c for group in groups for c in group], config.num_generations)
        self.register_images(rollout)
        return rollout, stats

    def register_images(self, rollout: Rollout) -> None:
        """Take the pictures of a rollout that this rank may not have read, but another, or an earlier process."""
        if self._album is not None:
            self._album.take(rollout.pictures, keep=False)

    def complete(
        self, requests: list[Request], sampling: Sampling, config: RolloutConfig, on_step: OnStep | None = None
    ) -> list[list[Completion]]:
        """Complete requests, bypassing the journal. Ranks enter and leave together."""
        with self.engine.generation() as view:
            groups, _ = self._complete(view, requests, sampling, config, Callbacks(on_step=on_step))
        return groups

    def _complete(
        self, view: Any, requests: list[Request], sampling: Sampling, config: RolloutConfig, callbacks: Callbacks
    ) -> tuple[list[list[Completion]], Stats]:
        callbacks = dataclasses.replace(callbacks, turns=self.turns, reading=self.reading)
        return complete(view, self.tokenizer, requests, sampling, config, callbacks, self.workspace)

    def micro_batches(self, rows: Sequence[TokenRow], *, gradients: bool = True, together: int = 1) -> list[MicroBatch]:
        """Split rows into micro-batches within `token_budget`, the same number on every rank. Rows of a group are not
        separated if `together` is its size; see `pack`. Collective."""
        device, share = self.engine.device, self.config.shared_prefix
        budget = token_budget(self.config, on_gpu=device.type != "cpu", gradients=gradients)
        if self.packs:
            found = pack(rows, budget, device, share=share, reading=self.reading, together=together, group=self._group)
        else:
            found = pad(rows, budget, device, reading=self.reading, together=together)
        # DeepSpeed makes no optimizer step without a backward pass, even if there is nothing to learn.
        return found or fillers(1, device, packed=self.packs)

    def forward(self, micro: MicroBatch, temperature: float, more: HeadFunction | None = None) -> tuple[Tensor, ...]:
        """Return the log-probabilities and entropies of the completion tokens, then the outputs of `more` for them,
        each float32 [b, T]; see `LogprobModel`. Collective."""
        return tuple(micro.unflatten(value_N) for value_N in self.engine(*micro.inputs, temperature, more))

    def accumulate_sft_gradient(
        self, prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]], beat: Callable[[], None]
    ) -> Iterator[tuple[Tensor, int]]:
        """Add the gradient of the mean cross-entropy of the completion tokens of all ranks, calling `beat` before each
        micro-batch. For each with rows, yield its mean cross-entropy in nats and its number of tokens. Collective."""
        tokens = sum(map(len, completion_ids))
        total_tokens = int(all_reduce(torch.tensor(tokens, device=self.engine.device)))
        for micro in self.micro_batches(TokenRow.of(prompt_ids, completion_ids)):
            beat()
            logp_bT, _ = self.forward(micro, temperature=1.0)
            # A filler has no rows: its token counts for nothing.
            loss = -logp_bT.sum() / total_tokens if micro.rows else 0.0 * logp_bT.sum()
            self.engine.backward(loss)
            if micro.rows:
                count = len(micro.target_N)
                yield -logp_bT.detach().sum() / count, count

    def logprobs(self, batches: list[MicroBatch], shape: tuple[int, int], temperature: float) -> Tensor:
        """logp_BT of the rows in `batches`; see `measured`. Collective."""
        return measured(self.engine, batches, shape, temperature)[0]
