"""Low-rank adapters (LoRA): small matrices trained alongside the linear layers of a model whose weights are frozen.

peft injects them in place: the model keeps its class, and each adapted layer is wrapped in one of peft's. Decoding and
export merge the adapters into the weights; adapters are also exported, and read, in peft's own format.
"""

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hybrid_grpo.config import LoraConfig
from hybrid_grpo.config.adapters import read_adapter
from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.model.towers import lacks_towers, loader

_NAME = "default"
"""peft's name for the only adapter of a model."""
_LINEAR = (nn.Linear, Conv1D)  # of GPT-2
_MATRIX = re.compile(r"base_model\.model\.(.*)\.lora_([AB])\.weight")


@dataclass(frozen=True, eq=False)
class Adapter:
    """The adapter of one linear layer: W + scale * B A (arXiv:2106.09685, section 4.1); B starts at 0."""

    layer: Any
    """peft's layer, which wraps `linear`."""
    linear: Any
    """The layer without the adapter."""
    down: nn.Parameter
    """A, [rank, in]; like B, empty while it is sharded."""
    up: nn.Parameter
    """B, [out, rank]."""
    scale: float
    """alpha / rank."""

    @classmethod
    def of(cls, layer: Any) -> Self:
        up, down = layer.lora_B[_NAME].weight, layer.lora_A[_NAME].weight
        return cls(layer, layer.base_layer, down, up, layer.scaling[_NAME])

    def merged(self, weight: Tensor, down: Tensor, up: Tensor, out: Tensor) -> Tensor:
        """Return `weight` plus the adapter, rounded once and written to `out`, which may be `weight`. All are whole."""
        if self.layer.fan_in_fan_out:
            # GPT-2's layers keep W transposed, and (B A)^T = A^T B^T.
            up, down = down.T, up.T
        return torch.addmm(weight, up, down, alpha=self.scale, out=out)


def reads_packed(linear: Any) -> bool:
    """Whether kernels read the weight of a layer of bitsandbytes: rows of whole blocks, whose scales are packed too."""
    weight: Any = getattr(linear, "weight", None)
    form = getattr(weight, "quant_state", None)
    if form is None or weight.dtype != torch.uint8 or getattr(form, "packing_format_for_cpu", False):
        return False
    blocks = form.blocksize == 64 and linear.in_features % 64 == 0
    return bool(blocks and form.nested and form.state2.blocksize == 256)


class Adapters:
    """Injects adapters into a transformers model, sharded or not, and freezes everything else.

    `seed` initializes the matrices A equally on every rank. Raises UserError for a layer that cannot have an adapter.
    """

    def __init__(self, model: Any, lora: LoraConfig, seed: int) -> None:
        import peft

        config = peft.LoraConfig(
            task_type="CAUSAL_LM", base_model_name_or_path=model.config.name_or_path, r=lora.rank,
            lora_alpha=lora.alpha, target_modules=_targets(model, lora),
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            try:
                peft.inject_adapter_in_model(config, model, adapter_name=_NAME)
            except ValueError as error:
                raise UserError(f"lora.target_modules: peft cannot adapt policy.model: {error}") from error
        self._config, self._beside_towers = model.peft_config[_NAME], lacks_towers(model)
        self.by_layer: dict[str, Adapter] = {
            path: Adapter.of(layer)
            for path, layer in model.named_modules()
            if isinstance(layer, peft.tuners.lora.LoraLayer)
        }
        """Adapters, by the path of their linear layer in a model without adapters."""
        for path, adapter in self.by_layer.items():
            # Experts were separate layers once; peft applies their old names to the module that now holds them all.
            if not isinstance(adapter.linear, _LINEAR):
                raise UserError(
                    f"lora.target_modules: peft would adapt {path} too, which is not a linear layer: leave out the"
                    " names of its experts' layers"
                )

    def __str__(self) -> str:
        layers = [adapter.layer for adapter in self.by_layer.values()]
        count = sum(layer.r[_NAME] * (layer.in_features + layer.out_features) for layer in layers)
        return f"{count:,} weights are trained, in adapters of rank {self._config.r} for {len(layers)} linear layers"

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained matrices, A and B of every layer."""
        return [p for adapter in self.by_layer.values() for p in (adapter.down, adapter.up)]

    def read(self, folder: str) -> None:
        """Take the matrices of an adapter, before they are sharded. Raises UserError if it has others."""
        found = matrices(folder, "policy.model")
        own = {path: (adapter.down.shape, adapter.up.shape) for path, adapter in self.by_layer.items()}
        refuse(
            {path: (down.shape, up.shape) for path, (down, up) in found.items()} != own,
            f"policy.model {folder} does not have a pair of matrices for each layer that lora.target_modules names: set"
            " lora.rank to 0 to merge it and train all weights",
        )
        with torch.no_grad():
            for path, (down, up) in found.items():
                self.by_layer[path].down.copy_(down)
                self.by_layer[path].up.copy_(up)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """A context in which the adapters add exactly 0. Their forwards still run: ZeRO-3 prefetches in the order of
        the last forward, and would have to record a new order at each change."""
        for adapter in self.by_layer.values():
            adapter.layer.scaling[_NAME] = 0.0
        try:
            yield
        finally:
            for adapter in self.by_layer.values():
                adapter.layer.scaling[_NAME] = adapter.scale

    def save(self, folder: Path, whole: Mapping[nn.Parameter, Tensor]) -> None:
        """Write a folder for `PeftModel.from_pretrained`; `whole` maps each of `parameters` to its unsharded weight."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            f"base_model.model.{path}.{name}.weight": whole[parameter].detach().to("cpu", copy=True)
            for path, adapter in self.by_layer.items()
            for name, parameter in (("lora_A", adapter.down), ("lora_B", adapter.up))
        }
        save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = copy.copy(self._config)
        config.inference_mode = True
        if self._beside_towers:
            # The layers of towers may have the same names.
            config.target_modules = set(self.by_layer)
        config.save_pretrained(str(folder))


def check_lora(lora: LoraConfig, config: Any) -> None:
    """Raise the errors that `Adapters` would raise, from a model's configuration alone, before its weights are read."""
    if lora.rank:
        with torch.device("meta"):
            Adapters(loader(config).from_config(config), lora, seed=0)


def _targets(model: Any, lora: LoraConfig) -> list[str]:
    head = model.get_output_embeddings()
    layers = dict(model.named_modules())
    linear = [path for path, layer in layers.items() if isinstance(layer, _LINEAR) and layer is not head]
    if lora.target_modules == "all-linear":
        import peft
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

        # It takes the names of dense MLPs for those that experts had as layers of their own.
        convert_peft_config_for_transformers(found := peft.LoraConfig(target_modules=linear), model, None)
        return [path for path in linear if path in found.target_modules]
    known = sorted({path.rpartition(".")[2] for path in linear})
    for target in lora.target_modules:
        found = [path for path in layers if f".{path}".endswith(f".{target}")]
        if any(layers[path] is head for path in found):
            raise UserError(f"lora.target_modules {target} is the output head, which is read by tiles: remove it")
        if not found or not set(linear).issuperset(found):
            what = "is not a linear layer" if found else "is not a layer"
            raise UserError(f"lora.target_modules {target} {what} of policy.model: {did_you_mean(target, known)}")
    return list(lora.target_modules)


def matrices(folder: str, setting: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of each layer by its path. Raises UserError, which begins with `setting`, if there is more."""
    file, found = Path(folder) / "adapter_model.safetensors", dict[tuple[str, str], Tensor]()
    try:
        for name, tensor in load_file(file).items():
            match = _MATRIX.fullmatch(name)
            refuse(match is None, f"{setting} {folder} has {name}, which is no matrix of LoRA: merge it with peft")
            found[match[1], match[2]] = tensor  # type: ignore[index]
        return {path: (found[path, "A"], found[path, "B"]) for path, _ in found}
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{setting} {folder}: {file.name}: {error}: save the adapter as safetensors") from None


def changes(model: Any, folder: str, setting: str) -> Iterator[tuple[Any, Tensor]]:
    """Yield each weight that an adapter changes, which may be sharded, and what the adapter adds to it, float32. Raises
    UserError if the adapter does not fit the model."""
    config, layers = read_adapter(folder, setting), dict(model.named_modules())
    for path, (down, up) in matrices(folder, setting).items():
        added = config["lora_alpha"] / config["r"] * (up.float() @ down.float())
        added = added.T.contiguous() if isinstance(layers.get(path), Conv1D) else added
        weight = getattr(layers.get(path), "weight", torch.empty(0))
        refuse(
            added.shape != getattr(weight, "ds_shape", weight.shape),
            f"{setting} {folder} does not fit its base {config['base_model_name_or_path']}, which has no such {path}:"
            " correct it in its adapter_config.json",
        )
        yield weight, added
