"""Loads models, their configurations and their tokenizers, from a folder or the hub.

Inside `engine.sharded_loading` the weights are loaded into shards; this module does not import the engine.
"""

import logging
import re
from collections.abc import Collection
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig, Mxfp4Config, PretrainedConfig
from transformers import logging as transformers_logging
from transformers.integrations import deepspeed as integration

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.config.adapters import base_of, is_adapter
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.distributed.ranks import all_gather_objects, rank
from hybrid_grpo.model import hub
from hybrid_grpo.model.architectures import unsupported
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.eight_bits import pack_tables
from hybrid_grpo.model.gguf import files_of
from hybrid_grpo.model.lora import changes
from hybrid_grpo.model.routing import recomputed
from hybrid_grpo.model.towers import causal_lm, has_tower, loader, outside_deepspeed

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels that a hub would have

_OTHER_CONFIG = "take the config.json that belongs to the weights"
_RESAVE = "or save the model without them (save_pretrained)"
_NO_TOKENIZER = "has no tokenizer: save the model's tokenizer in the same folder (tokenizer.save_pretrained)"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
"""Finds the number of a layer in the name of a weight."""


def load_tokenizer(name: str, setting: str = "policy.model") -> Any:
    """Load the tokenizer of a model folder or hub name; raises UserError if this fails."""
    if not (is_adapter(name) and (Path(name) / "tokenizer_config.json").is_file()):
        name = files_of(name, setting)
    _refuse_absent(name, setting)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers raises anything for files that it did not write
        _refuse_custom_code(error, name, setting)
        absent = "instantiate the backend tokenizer" in str(error)  # with a list of what it tried
        refuse(absent, f"{setting} {name} {_NO_TOKENIZER}")
        raise UserError(f"{setting} {name}: its tokenizer does not load: {_why(error, name)}") from error
    # For some architectures, transformers makes a tokenizer that has special tokens only.
    refuse(len(tokenizer) <= len(tokenizer.all_special_ids), f"{setting} {name} {_NO_TOKENIZER}")
    return tokenizer


def load_config(name: str, setting: str = "policy.model") -> Any:
    """Load the unchanged configuration of a model folder or hub name. Raises UserError if there is none, or
    transformers does not know the architecture. `setting` begins error messages, here and in the other functions."""
    name = files_of(name, setting)
    _refuse_absent(name, setting)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers raises anything for files that it did not write
        _refuse_custom_code(error, name, setting)
        raise UserError(f"{setting} {name} does not load: {_why(error, name)}") from error


def _refuse_absent(name: str, setting: str) -> None:
    """Refuse the path of a folder that does not exist. For another name that is none, find out if the hub answers."""
    path = Path(name)
    is_path = path.is_absolute() or name.startswith(".") or name.count("/") > 1
    refuse(is_path and not path.exists(), f"{setting} {name}: there is no such folder: check the path")
    if not path.exists():
        hub.silence()


def _why(error: Exception, name: str) -> str:
    if Path(name).exists():
        if isinstance(error, UnpicklingError):
            return "its pickled weights are damaged, or not only tensors: save them as safetensors"
        return first_line(error)
    if silence := hub.silence():
        return f"there is no such folder here, nor all of it in the hub's cache, and {silence}, or give a local folder"
    return f"there is no such folder here, and from the hub: {first_line(error)}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message (two if it ends in a colon), or the error's type if it has none."""
    text = f"KeyError: {error}" if isinstance(error, KeyError) else str(error).strip()
    lines = text.splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 1 + lines[0].rstrip().endswith(":")])[:500]


def _refuse_custom_code(error: Exception, name: str, setting: str) -> None:
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        raise UserError(
            f"{setting} {name} comes with code of its own (auto_map in its configuration), which is not run: use a"
            " model whose code is in transformers"
        ) from error


def _is_mxfp4(config: Any) -> bool:
    """Whether the files hold experts in four bits (gpt-oss, arXiv:2508.10925 section 2.1)."""
    return (getattr(config, "quantization_config", None) or {}).get("quant_method") == "mxfp4"


def dequantizing(config: Any) -> dict[str, Any]:
    """Return the options of `from_pretrained` that turn four bits in the files into numbers that can be trained."""
    return {"quantization_config": Mxfp4Config(dequantize=True)} if _is_mxfp4(config) else {}


@torch.no_grad()
def _check_packed(model: Any) -> None:
    """Raise UserError if a model has no packed layers, or reads weights of them other than by calling the layers."""
    packed = any(getattr(module, "source_cls", None) is nn.Linear for module in model.modules())
    attention, why = model.config._attn_implementation, "" if packed else "its linear layers are not torch's own"
    # In evaluation, bitsandbytes would lay weights out anew on a CPU.
    model.train().set_attn_implementation("eager")
    try:
        model(torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    except RuntimeError as error:
        why = f"it reads weights of linear layers itself ({first_line(error)})"
    model.set_attn_implementation(attention)
    refuse(bool(why), f"lora.load_in_4bit does not fit policy.model: {why}: leave it out")


def in_four_bits(dtype: torch.dtype) -> dict[str, Any]:
    """Return the options of `from_pretrained` that pack the weights of linear layers into four bits. What `load_model`
    loads has the embedding and the head in eight, by `pack_tables`."""
    packed = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": packed}


def dequantized(config: Any) -> Any:
    """Make a configuration describe the weights that `load_weights` makes of the files, in place, and return it."""
    vars(config).pop("quantization_config", None)
    return config


def weights_fact(policy: PolicyConfig) -> dict[str, str]:
    """Return lines about weights that are not trained as the files hold them, by their names; empty if all are."""
    if (base := base_of(policy.model)) != policy.model:
        said = f"{policy.model}, trained further or, with lora.rank 0, merged into its base {base}"
        return {"adapter": said, **weights_fact(replace(policy, model=base))}
    if policy.model.endswith(".gguf"):
        return {"weights": f"dequantized from {Path(policy.model).name}, once, into {files_of(policy.model)}"}
    config = load_config(policy.model)
    if has_tower(config):
        kept = "from the starting model, which must stay where it is"
        return {"tower": f"the model's tower for pictures is not trained: an export copies it {kept}"}
    if not _is_mxfp4(config):
        return {}
    return {"weights": f"in four bits in the files (MXFP4); loaded, trained and exported in {policy.dtype}"}


def plain_attention(config: Any, attn_implementation: str) -> str:
    """Return transformers' name of the attention that a setting selects; raises UserError if a model lacks it."""
    model = causal_lm(config)
    has_sdpa = model is None or model._supports_sdpa
    if attn_implementation in ("auto", "packed"):
        return "sdpa" if has_sdpa else "eager"
    if attn_implementation == "sdpa" and not has_sdpa:
        raise UserError(
            f"policy.attn_implementation sdpa: {model.__name__} has no attention of this kind: set it to eager"
        )
    return attn_implementation


def training_attention(policy: PolicyConfig, config: Any = None) -> str:
    """Return the name of the attention implementation for training. Raises UserError if the settings require packed
    rows and the architecture does not allow them. `config` defaults to the configuration of `policy.model`."""
    config = load_config(policy.model) if config is None else config
    if policy.attn_implementation in ("auto", "packed"):
        reason = unsupported(config)
        if reason is None:
            return ATTENTION
        for setting, value in (("attn_implementation", "packed"), ("shared_prefix", "on")):
            if getattr(policy, setting) == value:
                raise UserError(
                    f"policy.{setting} {value} does not fit policy.model {policy.model}, which cannot be packed:"
                    f" {reason}: set it to auto"
                )
    return plain_attention(config, policy.attn_implementation)


def without_dropout(config: Any) -> Any:
    """Set all dropout of a configuration and its sections, and noise on inputs of experts, to 0 in place; return it."""
    for field, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            without_dropout(value)
        elif isinstance(value, float) and any(word in field for word in ("dropout", "pdrop", "layerdrop", "jitter")):
            setattr(config, field, 0.0)
    return config


def load_model(
    policy: PolicyConfig, attn_implementation: str | None = None, setting: str = "policy.model", *,
    four_bits: bool = False,
) -> Any:  # fmt: skip
    """Load the causal language model that `policy` names, with `four_bits` as `lora.load_in_4bit` says.

    Dropout is off in training too: with it, the trained policy would differ from the one that sampled.
    `attn_implementation` overrides the policy's setting. Raises UserError as `load_weights` and `plain_attention` do.
    """
    config = load_config(policy.model, setting)
    attention = attn_implementation or plain_attention(config, policy.attn_implementation)
    plain, dtype = without_dropout(config), getattr(torch, policy.dtype)
    options = {"dtype": dtype, "attn_implementation": attention, **(in_four_bits(dtype) if four_bits else {})}
    model = load_weights(loader(config), policy.model, plain, setting, **options)
    if four_bits:
        pack_tables(model)
        _check_packed(model)
    if policy.gradient_checkpointing:
        kind = type(model).__name__
        refuse(
            not model.supports_gradient_checkpointing, f"policy.gradient_checkpointing: {kind} has none: leave it off"
        )
        kept = partial(recomputed, policy.gradient_checkpointing is True)
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": kept})
    return model


def parameters_of(name: str) -> int:
    """Return a causal language model's number of parameters, computed from its configuration."""
    config = load_config(name)
    with torch.device("meta"):
        model = loader(config).from_config(config, trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.parameters())


def load_weights(auto: Any, name: str, config: Any, setting: str, **options: Any) -> Any:
    """Load a model through `auto`, one of transformers' AutoModel classes. Raises UserError if weights do not load, are
    missing, are left out, or are not finite."""
    options |= dequantizing(config)
    # Wrong shapes are reported below, by name.
    safe = {"ignore_mismatched_sizes": True, "trust_remote_code": False, "weights_only": True}
    adapter, name = name, files_of(name, setting)
    options |= {"output_loading_info": True, **safe}
    try:
        model, loaded = auto.from_pretrained(name, config=config, **options)
        if integration.is_deepspeed_zero3_enabled():
            # Into shards, transformers loads without noting what the files have too much: ask without reading weights.
            with outside_deepspeed():
                _, noted = auto.from_pretrained(name, config=deepcopy(config), device_map="meta", **options)
            loaded = {what: {*loaded[what], *noted[what]} for what in loaded}
    except (OSError, ValueError, KeyError, ImportError, SafetensorError, UnpicklingError) as error:
        raise UserError(f"{setting} {name} does not load: {_why(error, name)}") from error
    # transformers would start missing weights at random, leave out others, and only warn.
    for what, names, way_out in (
        ("lacks {} of the weights", {*loaded["missing_keys"]}, f"take a complete {type(model).__name__}"),
        ("has the wrong shape for {} of the weights", {key[0] for key in loaded["mismatched_keys"]}, _OTHER_CONFIG),
        ("has {} weights beside those", _left_out(model, loaded["unexpected_keys"]), f"{_OTHER_CONFIG}, {_RESAVE}"),
    ):
        refuse(
            bool(names),
            f"{setting} {name} {what.format(len(names))} that its config.json asks for, {_first(names)} among them:"
            f" {way_out}",
        )
    add_adapter(model, adapter, setting)
    _refuse_broken_weights(model, f"{setting} {name}")
    _refuse_changes(model, f"{setting} {name}")
    return model


def _first(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:3])


def _left_out(model: Any, unexpected: Collection[str]) -> set[str]:
    """Return the names in a model's files that it has no place for, without those that models leave out on purpose:
    layers that predict further tokens, and for a classifier the head of the language model."""
    config = model.config.get_text_config(decoder=True)
    further = getattr(config, "num_nextn_predict_layers", 0) or 0
    beyond = range(getattr(config, "num_hidden_layers", 0), getattr(config, "num_hidden_layers", 0) + further)
    return {
        name
        for name in unexpected
        if (model.get_output_embeddings() is not None or name.startswith(f"{model.base_model_prefix}."))
        and not ((layer := _LAYER.search(name)) and int(layer[1]) in beyond)
    }


@torch.no_grad()
def _refuse_broken_weights(model: Any, start: str) -> None:
    broken = [name for name, parameter in model.named_parameters() if not bool(torch.isfinite(_held(parameter)).all())]
    # Gathered as objects: the weights are in host memory, where NCCL cannot reduce.
    count = max(all_gather_objects(len(broken)))
    if count:
        first = f", {broken[0]} among them" if broken else ""
        raise UserError(f"{start}: {count} of its weights hold NaN or infinity{first}: use an intact copy")


def _refuse_changes(model: Any, start: str) -> None:
    """Raise UserError if the loaded model is not what its class builds from its config.json: if weights are untied that
    it ties, or if a buffer that it computes differs.

    `zero.Init` casts the results of tensor constructors. Rotary frequencies in bfloat16 are off by a radian at
    position 1,000, and no metric shows it: sampling and training share them, but the exported model has exact ones.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        # Classes that build another model inside, such as sequence classifiers, would shard it.
        with outside_deepspeed(), init_empty_weights(include_buffers=False):
            built = type(model)(deepcopy(model.config))
    finally:
        torch.set_default_dtype(before)
    untied = built.all_tied_weights_keys.keys() - model.all_tied_weights_keys.keys()
    refuse(
        bool(untied),
        f"{start}: config.json ties {_first(untied)} to the embedding, and the files hold different values for both:"
        " set tie_word_embeddings to false in config.json, or take the config.json that belongs to the weights",
    )
    expected = dict(built.named_buffers())
    saved = model.state_dict(keep_vars=True).keys()  # they come with the weights, so their values are not the class's
    for name, buffer in model.named_buffers():
        right = expected.get(name)
        if name in saved or right is None or not right.is_floating_point():
            continue
        tolerance = 16 * torch.finfo(right.dtype).eps  # powers on a GPU and a CPU differ in the last bits
        same = torch.allclose(buffer.cpu().float(), right.float(), tolerance, tolerance, equal_nan=True)
        if buffer.dtype != right.dtype or not same:
            raise UserError(
                f"{start}: its buffer {name} was changed while it was loaded ({buffer.dtype}, {right.dtype} by its"
                " class), so exports would differ: update transformers and deepspeed, or lower the ZeRO stage"
            )


def _held(parameter: Any) -> Tensor:
    """Return the part of a weight that this rank holds, without the padding at the end of its shard."""
    if not hasattr(parameter, "ds_tensor"):
        return cast(Tensor, parameter)
    shard: Tensor = parameter.ds_tensor.view(-1)
    return shard[: max(0, parameter.ds_numel - rank() * shard.numel())]


@torch.no_grad()
def add_adapter(model: Any, name: str, setting: str = "policy.model") -> None:
    """Add an adapter to the weights of its base, rounded once, if the name of the model is that of an adapter."""
    for weight, added in changes(model, name, setting) if is_adapter(name) else ():
        held = _held(weight).view(-1)
        first = rank() * weight.ds_tensor.numel() if hasattr(weight, "ds_tensor") else 0
        held += added.view(-1)[first : first + len(held)]
