"""Everything about DeepSpeed: its configuration, the engine around the policy, and the switch to generation.

No other module imports deepspeed. Three hazards decide how it is used here:

- The inference kernels that the hybrid engine injects do not run on transformers 5. They are turned off, and decoding
  reads the weights through a view (model/gathered_weights.py).
- `memory_efficient_linear` would replace `torch.nn.functional.linear` in the whole process, make decoding several times
  slower and round differently. It is off.
- The engine averages gradients over ranks. Losses are already divided by global counts, so `backward` undoes that.
"""

import contextlib
import functools
import gc
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed.runtime.hybrid_engine
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import Tensor, nn
from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

from hybrid_grpo.config import EngineConfig, PolicyConfig
from hybrid_grpo.config.errors import RunInterrupted, RunStopped, UserError
from hybrid_grpo.distributed import ranks, shards, tensor_files
from hybrid_grpo.distributed.hardware import refuse_idle_gpus, take_gpu
from hybrid_grpo.model.gathered_weights import View, Weights
from hybrid_grpo.model.lora import Adapter
from hybrid_grpo.model.towers import whole_layers

_COUNTS = ("global_steps", "global_samples", "skipped_steps")
"""Counters of DeepSpeed's engine, which its profiler relies on."""
_REFERENCE = "reference"
"""Name of a frozen model's files in a checkpoint."""
_DONE, _INTERRUPTED, _STOPPED, _FAILED = range(4)
"""How generation ended on a rank; the maximum over ranks decides. A failed rank reports `_FAILED` plus its number."""
_ENDS: dict[type[Exception], int] = {RunInterrupted: _INTERRUPTED, RunStopped: _STOPPED}


def start(timeout_minutes: float = 30.0) -> torch.device:
    """Join the process group that the launcher describes, or form a group of one, and return this rank's device. A
    collective that waits longer than `timeout_minutes` raises an error."""
    if not gc.isenabled():
        gc.freeze()  # what has been imported stays, and need not be looked at again
        gc.enable()
    # torch warns at every call that DeepSpeed uses the old names of collectives.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.runtime.hybrid_engine.replace_policies = []
    # The workspace of those kernels: creating it would compile them, which takes minutes and needs nvcc.
    deepspeed.runtime.hybrid_engine.WorkspaceOp = lambda: None
    store = None if "RANK" in os.environ else ranks.form_group_of_one()
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    if on_cpu:
        # In half precision, oneDNN and torch each keep code for the last 1,024 sizes of products, a GB after 100 steps.
        for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            os.environ.setdefault(cache, "64")
        refuse_idle_gpus()
    else:
        take_gpu(accelerator)
    # DeepSpeed would try to compile all of its kernels, and on a CPU compile one for tensor-parallel inference.
    deepspeed.ops.__compatible_ops__ = {}
    with ranks.meeting():
        backend, timeout = accelerator.communication_backend_name(), timedelta(minutes=timeout_minutes)
        if store and not torch.distributed.is_initialized():
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=timeout)
        if not on_cpu:
            # NCCL starts with the first collective: if it cannot, that is reported here.
            ranks.all_reduce(torch.zeros(1, device=accelerator.current_device_name()))
    return torch.device(accelerator.current_device_name())


@contextlib.contextmanager
def _compiling_late() -> Iterator[None]:
    """A context in which DeepSpeed's functions for torch.compile are compiled when they are first called. It imports
    Muon for every optimizer, and with Muon's functions torch's compiler, which takes two seconds."""

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = functools.cache(lambda: torch.compile(function))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    before = deepspeed.runtime.compiler.compile
    deepspeed.runtime.compiler.compile = lambda: late
    try:
        yield
    finally:
        deepspeed.runtime.compiler.compile = before


def policy_config(policy: PolicyConfig, engine: EngineConfig) -> dict[str, Any]:
    """Return the DeepSpeed configuration of the policy, with the user's sections merged in."""
    on_gpu = get_accelerator().device_name() != "cpu"
    adam = {"lr": policy.lr, "betas": list(policy.betas), "weight_decay": policy.weight_decay}
    adam |= {"torch_adam": True, "fused": True}  # one pass over the weights, without temporaries; nothing to compile
    config: dict[str, Any] = {
        **_common(policy.dtype),
        # One engine.step() is one optimizer step, after any number of micro-batches.
        "managed_gradient_accumulation": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": policy.max_grad_norm,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"stage": engine.stage(ranks.world_size()), "memory_efficient_linear": False},
        "hybrid_engine": {"enabled": True},
    }
    if engine.offload_optimizer is True:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    if "offload_param" in engine.deepspeed.get("zero_optimization", {}):
        # Copies from unpinned memory would not overlap with the computation.
        config["zero_optimization"]["offload_param"] = {"pin_memory": on_gpu}
    return _merged(config, engine.deepspeed)


def check_config(policy: PolicyConfig, engine: EngineConfig) -> None:
    """Raise UserError if DeepSpeed rejects the configuration of the policy."""
    config = policy_config(policy, engine)
    name = str(config["optimizer"].get("type"))
    if name.lower() not in ("adam", "adamw"):
        known = "policy.lr, policy.betas and checkpoints are those of Adam and AdamW"
        raise UserError(f"engine.deepspeed.optimizer.type {name} is not supported ({known}): remove it")
    try:
        DeepSpeedConfig(config)
    except Exception as error:  # whatever its parser of this section raises on a wrong type
        why = str(error).partition(" [type=")[0] or repr(error)
        raise UserError(f"engine.deepspeed: DeepSpeed refuses the configuration: {why}") from error


def _common(dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == "bfloat16"},
        "steps_per_print": 10**9,
        # Its timer would wait for the GPU at the start of every forward.
        "timers": {"throughput": {"enabled": False}},
    }


def _merged(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `override` merged in, section by section."""
    merged = dict(base)
    for key, value in override.items():
        below = merged.get(key)
        if isinstance(value, dict):
            value = _merged(below if isinstance(below, dict) else {}, value)
        # Counts such as 5e7 are integers for DeepSpeed.
        merged[key] = int(value) if isinstance(value, float) and value.is_integer() else value
    return merged


@contextlib.contextmanager
def sharded_loading(config: dict[str, Any]) -> Iterator[None]:
    """A context in which `from_pretrained` loads weights directly into shards if `config` uses ZeRO-3."""
    if config["zero_optimization"]["stage"] < 3:
        yield
        return
    keep_alive = HfDeepSpeedConfig(config)
    try:
        yield
    finally:
        del keep_alive
        unset_hf_deepspeed_config()


@dataclass(frozen=True)
class StepResult:
    """The outcome of an optimizer step: the global gradient norm before clipping, and whether the weights changed. If
    the norm is not finite, all ranks skip the step."""

    grad_norm: float
    applied: bool


class Engine:
    """The policy in training, and the switch to generation.

    Args:
        module: the module to train; its parameters may be sharded already.
        source: the submodule of `module` that generates.
        view: a module of the same class and structure as `source`, on the meta device.
        config: see `policy_config`.
        adapters: the adapters in `source`, by the path of their layer in `view`.
        keep_view, weights: `keep` and `weights` of `View`.
        parks: whether optimizer states are on the device only while they are used, at ZeRO stage 2 or 3.
    """

    def __init__(
        self, module: nn.Module, source: nn.Module, view: nn.Module, config: dict[str, Any],
        adapters: Mapping[str, Adapter] | None = None, keep_view: bool = False, weights: Weights = "merged",
        parks: bool = False,
    ) -> None:  # fmt: skip
        if config["zero_optimization"]["stage"] == 3 and (layers := whole_layers(source)):
            for layer in layers:
                deepspeed.utils.set_z3_leaf_module(layer, True)
            # By default, a fraction of a large layer is fetched ahead, and the rest is waited for.
            largest = max(sum(getattr(p, "ds_numel", p.numel()) for p in layer.parameters()) for layer in layers)
            ahead = max(DeepSpeedZeroConfig().prefetch_bucket_size, largest)
            config = _merged({"zero_optimization": {"stage3_prefetch_bucket_size": ahead}}, config)
        self.config = config
        try:
            with _compiling_late():
                self.engine, *_ = deepspeed.initialize(
                    model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], config=config
                )
        except UserError:
            raise
        except (ValueError, AssertionError, TypeError) as error:
            raise UserError(f"engine.deepspeed: DeepSpeed refuses the configuration: {error}") from error
        self.stage = self.engine.zero_optimization_stage()
        self.engine.module.train()
        if self.stage == 0 and not self.engine.bfloat16_enabled():
            self.engine.clip_fp32_gradients = self._clip_gradients
        self.device = torch.device(get_accelerator().current_device_name())
        self._parked: shards.ParkedStates | None = None
        if parks and self.device.type != "cpu":
            self._parked = shards.ParkedStates(self.engine.optimizer, self.stage, self.device)
        self._gradients: shards.GradientBuffers | None = None
        if self.stage == 3 and self.device.type != "cpu" and not keep_view:
            self._gradients = shards.GradientBuffers(self.engine.optimizer, self.device)
        self._view = View(source, view.eval(), self.stage == 3, self.device, adapters, keep=keep_view, weights=weights)
        self.merged, self._generating = self._view.merged, False
        self.gather_s = self.release_s = self.wait_s = 0.0
        """Seconds that the last switch spent gathering, releasing, and waiting for the other ranks at the end."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass. Collective under ZeRO-3."""
        assert not self._generating, "the training forward is closed while the policy generates"
        if self._gradients:
            self._gradients.restore()
        return self.engine(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, which is this rank's part of a sum over all ranks."""
        # The factor undoes the engine's averaging over ranks.
        self.engine.backward(loss * ranks.world_size(), scale_wrt_gas=False)

    def step(self, lr: float) -> StepResult:
        """Update the weights with the gradients of all `backward` calls since the last step, at learning rate `lr`."""
        if tensor_files.copying:
            tensor_files.settle()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        if self._parked:
            with self._parked.on_device():
                self.engine.step()
            get_accelerator().synchronize()
            get_accelerator().empty_cache()
        else:
            self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return StepResult(float("nan") if norm is None else float(norm), self.engine.was_step_applied())

    def _clip_gradients(self) -> None:
        # Without ZeRO, in float32, the engine neither reports the norm nor checks it.
        parameters = [p for p in self.engine.module.parameters() if p.grad is not None]
        self.engine._global_grad_norm = norm = nn.utils.clip_grad_norm_(parameters, self.engine.gradient_clipping())
        self.engine.optimizer.overflow = not bool(torch.isfinite(norm))
        if self.engine.optimizer.overflow:
            # Gradients are reduced, so all ranks take this branch. Without gradients AdamW changes nothing.
            self.engine.module.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def generation(self, *, exact: bool = False) -> Iterator[Any]:
        """Yield the policy for decoding: a plain module with unsharded weights, without hooks, in eval mode; to be
        written, with `exact` ones.

        All ranks enter and leave together; nothing in between waits for another rank, and leaving waits for however
        long the others take. At the end, an exception on one rank raises one on every rank: RunInterrupted or
        RunStopped if it was one of these, otherwise RuntimeError.
        """
        if self._generating:
            raise RuntimeError("generation() is already open: it does not nest")
        start = time.perf_counter()
        if self._gradients:
            self._gradients.free()
        # DeepSpeed keeps small parameters gathered, which the view uses if there are no others.
        if self.stage == 3 and not all(p.ds_persist for p in self.engine.module.parameters()):
            # Free parameters that prefetching left gathered, for the cache. (The engine's own method of this name also
            # collects garbage, which takes longer than a whole rollout of a small model.)
            self.engine.optimizer.empty_partition_cache()
            if not self._view.keeps:
                get_accelerator().empty_cache()
        self._generating = True
        outcome = torch.full((1,), _DONE, device=self.device)
        self._view.gather(exact=exact)
        get_accelerator().synchronize()
        self.gather_s = time.perf_counter() - start
        try:
            yield self._view.module
        except Exception as error:
            outcome.fill_(_ENDS.get(type(error), _FAILED + ranks.rank()))
            raise
        finally:
            start = time.perf_counter()
            self._view.release()
            self._generating = False
            here, end = int(outcome), time.perf_counter()
            ranks.wait_for_all()
            anywhere = int(ranks.all_reduce(outcome, "max"))
            self.release_s, self.wait_s = end - start, time.perf_counter() - end
            if anywhere >= _FAILED and here < _FAILED:
                raise RuntimeError(f"generation failed on rank {anywhere - _FAILED}; see that rank's message")
            if anywhere == _STOPPED and here < _STOPPED:
                raise RunStopped("generation was stopped on another rank; see that rank's message")
            if anywhere == _INTERRUPTED and here == _DONE:
                raise RunInterrupted("stopped")

    def whole(self, parameters: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Return the unsharded weights of parameters on this rank's device; do not write to them. Collective."""
        return self._view.whole(parameters)

    def print_communication(self) -> None:
        """Print DeepSpeed's table of collectives if `engine.deepspeed.comms_logger` is enabled. Collective."""
        if self.config.get("comms_logger", {}).get("enabled"):
            deepspeed.comm.log_summary()

    def save(self, folder: Path, tag: str, state: dict[str, Any]) -> None:
        """Write this rank's part of the checkpoint `folder/tag`: trained weights, optimizer states, and its `state`."""
        (folder / tag).mkdir(parents=True, exist_ok=True)
        shards.save_optimizer(folder / tag, self.engine.module, self.engine.optimizer, self.stage)
        shards.save_state(folder / tag, {"state": state, "counts": {n: getattr(self.engine, n) for n in _COUNTS}})

    def load(self, folder: Path, tag: str) -> dict[str, Any]:
        """Read the checkpoint `folder/tag`, written by any number of ranks at any ZeRO stage, and return this rank's
        state, or rank 0's if the number of ranks has changed. Raises UserError if a file is unreadable. Collective."""
        saved = shards.load_state(folder / tag)
        shards.load_optimizer(folder / tag, self.engine.module, self.engine.optimizer, self.stage)
        for name, count in saved["counts"].items():
            setattr(self.engine, name, count)
        return dict(saved["state"])


class OffloadedModel:
    """A model under ZeRO-3 that is only run forward, with its parameters in host memory. Creating one is collective.

    The first forward records the order of the layers; from the second on, DeepSpeed prefetches the next layers while
    one computes. `read` loads the model directly into shards; for `fetching` see `EngineConfig.fetching`.
    """

    def __init__(self, read: Callable[[], nn.Module], dtype: str, fetching: Mapping[str, Any] | None = None) -> None:
        offload = {"device": "cpu", "pin_memory": get_accelerator().device_name() != "cpu"}
        zero = {"stage": 3, "memory_efficient_linear": False, "offload_param": offload}
        config = _merged({**_common(dtype), "zero_optimization": zero}, {"zero_optimization": dict(fetching or {})})
        with sharded_loading(config):
            module = read()
        self.engine, *_ = deepspeed.initialize(model=module.requires_grad_(False), config=config)
        self.engine.module.eval()
        self.device = torch.device(get_accelerator().current_device_name())
        self._averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass without gradients. Collective."""
        return self.engine(*args, **kwargs)

    def blend(self, source: Engine, mix: float) -> None:
        """Set the weights to `mix` times the weights of `source` plus (1 - `mix`) times their old values, which
        `shards.blend` keeps unrounded. `source` has the same class, at any ZeRO stage. Ranks do not communicate."""
        self.release()
        shards.blend(self.engine.module, source.engine.module, source.stage, mix, self._averages)

    def save(self, folder: Path) -> None:
        """Write this rank's shards into a checkpoint's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        shards.save_module(folder, _REFERENCE, self.engine.module, self._averages)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on any number of ranks; raises UserError if nothing was saved."""
        self.release()
        self._averages = shards.load_module(folder, _REFERENCE, self.engine.module)

    def release(self) -> None:
        """Free small weights, which stay gathered between forwards, and would not follow a change of their shards."""
        self.engine.optimizer.empty_partition_cache()
