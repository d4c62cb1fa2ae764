"""Everything DeepSpeed: its configuration, the engine around the policy, and the switch to generation.

No other module imports deepspeed. What was found out the hard way:

- The injected inference kernels of the hybrid engine do not run on transformers 5; it is told to know none, and
  decoding reads the shards through a view (view.py) instead.
- `memory_efficient_linear` would replace `torch.nn.functional.linear` for the whole process, slow decoding
  several times and round differently from it; it is off.
- The engine averages gradients over ranks. Losses here are already divided by global counts, so `backward`
  multiplies by the number of ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.runtime.hybrid_engine
import torch
import yaml
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.utils.cpp_extension import get_default_build_root
from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

from hybrid_grpo.config import EngineConfig, PolicyConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed import all_reduce, check_shared_memory, rank, release_shared_memory, world_size
from hybrid_grpo.model.lora import Adapter
from hybrid_grpo.model.view import View

_COMPILE_SECONDS = 300
"""No kernel takes longer to compile than this; the slowest seen took 40 s on two cores."""


def start() -> torch.device:
    """Join the process group that the launcher describes, or be a group of one; return this rank's device."""
    # torch renames collectives that DeepSpeed still calls by their old names, at every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.runtime.hybrid_engine.replace_policies = []
    # Of which it would warn on every rank.
    deepspeed.utils.logger.addFilter(lambda record: "No compatible DeepSpeed inference" not in record.getMessage())
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in alone.items()})
    # Kernels are compiled with the ninja of this environment, also where it was not activated: two versions of it
    # disagree on what is up to date, and would compile everything again in turns.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    _wait_for_compilers()
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    if on_cpu:
        check_shared_memory()
    else:
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(dist_backend=accelerator.communication_backend_name(), verbose=False)
    if on_cpu:
        release_shared_memory()
    return torch.device(accelerator.current_device_name())


def _wait_for_compilers() -> None:
    """Kernels are compiled under a lock file that a killed process leaves behind, and torch would wait for ever."""
    start = time.time()
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", get_default_build_root()))
    said = False
    while locks := list(root.glob("**/deepspeed_*/lock")):
        for path in locks:
            # Whoever made the lock may remove it at any moment.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _COMPILE_SECONDS:
                    path.unlink()
        if not said and time.time() - start > 5:
            print(f"hybrid-grpo: another process compiles DeepSpeed's kernels ({locks[0]}): waiting", flush=True)
            said = True
        time.sleep(0.2)


def policy_config(policy: PolicyConfig, engine: EngineConfig) -> dict[str, Any]:
    """The complete DeepSpeed configuration of the policy, the user's sections merged in."""
    on_gpu = get_accelerator().device_name() != "cpu"
    torch_adam = engine.adam == "torch" or (engine.adam == "auto" and not (on_gpu and engine.offload_optimizer))
    config: dict[str, Any] = {
        **_common(policy.dtype),
        # One engine.step() is one optimizer step, after any number of micro-batches.
        "managed_gradient_accumulation": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": policy.max_grad_norm,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": policy.lr,
                "betas": list(policy.betas),
                "weight_decay": policy.weight_decay,
                "torch_adam": torch_adam,
            },
        },
        "zero_optimization": {"stage": engine.zero_stage, "memory_efficient_linear": False},
        "hybrid_engine": {"enabled": True},
        "checkpoint": {"tag_validation": "Fail"},
    }
    if engine.offload_optimizer:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    return _merged(config, engine.deepspeed)


def frozen_config(dtype: str) -> dict[str, Any]:
    """The DeepSpeed configuration of a model that is not trained: parameters live in host memory, a shard on each
    rank."""
    on_gpu = get_accelerator().device_name() != "cpu"
    return {
        **_common(dtype),
        "zero_optimization": {
            "stage": 3,
            "memory_efficient_linear": False,
            "offload_param": {"device": "cpu", "pin_memory": on_gpu},
        },
    }


def _common(dtype: str) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": dtype == "bfloat16"}, "steps_per_print": 10**9}


def _merged(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """`override` over `base`, section by section; text (from the command line) is read as YAML."""
    merged = dict(base)
    for key, value in override.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            merged[key] = _merged(below, value)
        else:
            merged[key] = _from_text(value) if isinstance(value, str) else value
    return merged


def _from_text(text: str) -> Any:
    """A number, a truth value or text. YAML alone would keep 5e7 as text; what DeepSpeed counts is whole."""
    try:
        number = float(text)
    except ValueError:
        return yaml.safe_load(text)
    return int(number) if number.is_integer() else number


@contextlib.contextmanager
def sharded_loading(config: dict[str, Any]) -> Iterator[None]:
    """Inside, `from_pretrained` builds models as `config` says: under ZeRO-3 straight into shards."""
    if config["zero_optimization"]["stage"] < 3:
        yield
        return
    keep_alive = HfDeepSpeedConfig(config)
    try:
        yield
    finally:
        del keep_alive
        unset_hf_deepspeed_config()


@dataclass
class SwitchTime:
    """Seconds of the last switch, without the waiting of ranks for each other at its end."""

    gather_s: float = 0.0
    release_s: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did."""

    grad_norm: float
    """Global gradient norm before clipping; not finite when the step was skipped."""
    applied: bool
    """False when the gradient was not finite: no rank stepped."""


class Engine:
    """The policy in training, and the switch to generation.

    Args:
        module: what is trained; its parameters may be sharded already.
        source: the submodule that generates.
        view: a module of the same class and structure as `source`, on the meta device.
        config: see `policy_config`.
        adapters: those in `source`, if it has any, by the path of their layer in `view`.
    """

    def __init__(
        self,
        module: nn.Module,
        source: nn.Module,
        view: nn.Module,
        config: dict[str, Any],
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        self.config = config
        try:
            self.engine, *_ = deepspeed.initialize(
                model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], config=config
            )
        except (ValueError, AssertionError) as error:
            raise UserError(f"engine.deepspeed: DeepSpeed refuses the configuration: {error}") from error
        self.stage = self.engine.zero_optimization_stage()
        self.engine.module.train()
        if self.stage == 0 and not self.engine.bfloat16_enabled():
            self.engine.clip_fp32_gradients = self._clip_gradients
        self.device = torch.device(get_accelerator().current_device_name())
        self._view = View(source, view.eval(), sharded=self.stage == 3, device=self.device, adapters=adapters)
        self._frozen = any(not p.requires_grad for p in module.parameters())
        self._generating = False
        self.switch_time = SwitchTime()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the module; collective under ZeRO-3."""
        assert not self._generating, "the training forward is closed while the policy generates"
        return self.engine(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, this rank's share of a sum over all ranks."""
        # Undoes the engine's averaging over ranks; see the module's docstring.
        self.engine.backward(loss * world_size(), scale_wrt_gas=False)

    def step(self, lr: float) -> StepResult:
        """Update the weights with what `backward` gathered, at learning rate `lr`."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return StepResult(float("nan") if norm is None else float(norm), self.engine.was_step_applied())

    def _clip_gradients(self) -> None:
        """Without ZeRO, in float32, the engine neither reports the norm nor looks whether it is finite."""
        parameters = [p for p in self.engine.module.parameters() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(parameters, self.engine.gradient_clipping())
        self.engine._global_grad_norm = norm
        self.engine.optimizer.overflow = not bool(torch.isfinite(norm))
        if self.engine.optimizer.overflow:
            # The gradients are reduced, so all ranks are here; without gradients AdamW leaves everything as it is.
            self.engine.module.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def generation(self) -> Iterator[Any]:
        """The policy for decoding: a plain module with whole weights, no hooks, in eval mode.

        All ranks enter and leave together; nothing in between waits for another rank. An error on one rank is
        an error on all of them at the end.
        """
        if self._generating:
            raise RuntimeError("generation() is already open: it does not nest")
        start = time.perf_counter()
        if self.stage == 3:
            # What prefetching left gathered is memory that the cache can use. (The engine's own method of this
            # name also collects garbage, which costs more than a whole decode of a small model.)
            self.engine.optimizer.empty_partition_cache()
            get_accelerator().empty_cache()
        self._generating = True
        failed = torch.zeros(1, device=get_accelerator().current_device_name())
        self._view.gather()
        get_accelerator().synchronize()
        self.switch_time.gather_s = time.perf_counter() - start
        try:
            yield self._view.module
        except Exception:
            failed.fill_(1)
            raise
        finally:
            start = time.perf_counter()
            self._view.release()
            self._generating = False
            self.switch_time.release_s = time.perf_counter() - start
            here = bool(failed)
            if bool(all_reduce(failed, "max")) and not here:
                raise RuntimeError("generation failed on another rank; its own message says why")

    def whole(self, parameters: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Whole weights of the module's parameters, on this rank's device; not to be written to. Collective."""
        return self._view.whole(parameters)

    def save(self, folder: Path, tag: str, state: dict[str, Any]) -> None:
        """Write a checkpoint `folder/tag`; `state` is this rank's own. The caller moves `latest`.

        What is not trained is not in it: it is where it was loaded from.
        """
        self.engine.save_checkpoint(
            str(folder), tag=tag, client_state=state, save_latest=False, exclude_frozen_parameters=True
        )

    def load(self, folder: Path, tag: str) -> dict[str, Any]:
        """Read the checkpoint `folder/tag`; return this rank's state.

        Raises:
            UserError: it was written by another number of ranks.
        """
        try:
            path, state = self.engine.load_checkpoint(str(folder), tag=tag, load_module_strict=not self._frozen)
        except Exception as error:
            raise UserError(f"run.resume: checkpoint {folder / tag} cannot be read: {error}") from error
        if path is None:
            raise UserError(f"run.resume: checkpoint {folder / tag} holds nothing for this rank")
        return dict(state)


class Frozen:
    """A model under ZeRO-3 that is only run forward, its parameters in host memory."""

    def __init__(self, read: Callable[[], nn.Module], dtype: str) -> None:
        """`read` loads the model, straight into shards; `dtype` is that of its weights, by name. Collective."""
        config = frozen_config(dtype)
        with sharded_loading(config):
            module = read()
        self.engine, *_ = deepspeed.initialize(model=module.requires_grad_(False), config=config)
        self.engine.module.eval()
        self.device = torch.device(get_accelerator().current_device_name())

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the module; collective."""
        return self.engine(*args, **kwargs)

    @torch.no_grad()
    def blend(self, source: Engine, mix: float) -> None:
        """Make the weights `mix` times those of `source` plus the rest of what they are.

        Each rank does so with its own shards: nothing is gathered, and nobody is waited for. `source` is a module of
        the same class, at any ZeRO stage; the sum is rounded to the type of the weights.
        """
        sources = dict(source.engine.module.named_parameters())
        self._release()
        for name, parameter in self.engine.module.named_parameters():
            shard = parameter.ds_tensor
            theirs = _shard_of(sources[name], shard.numel()).to(shard.device, torch.float32)
            ours = shard[: len(theirs)]
            ours.copy_(torch.lerp(ours.float(), theirs, mix))

    def save(self, path: Path) -> None:
        """Write this rank's shards."""
        # Copies: with a shard itself, what DeepSpeed has hung on it would be written.
        shards = {name: p.ds_tensor.to("cpu", copy=True) for name, p in self.engine.module.named_parameters()}
        torch.save(shards, path)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Read what `save` wrote on this rank."""
        shards = torch.load(path, weights_only=True)
        self._release()
        for name, parameter in self.engine.module.named_parameters():
            parameter.ds_tensor.copy_(shards[name])

    def _release(self) -> None:
        """Let go of small weights, which stay gathered from forward to forward and would not follow their shards."""
        self.engine.optimizer.empty_partition_cache()


def _shard_of(parameter: Any, size: int) -> Tensor:
    """This rank's part of a parameter, flat, where ZeRO-3 makes shards of `size` elements; no padding below stage 3."""
    if hasattr(parameter, "ds_tensor"):
        assert parameter.ds_tensor.numel() == size, "both are sharded over the same ranks"
        return parameter.ds_tensor
    return parameter.data.view(-1)[rank() * size : (rank() + 1) * size]
