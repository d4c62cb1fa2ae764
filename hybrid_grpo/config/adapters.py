"""The folder of an adapter in peft's format (LoRA) in place of a model: it stands for its base with the adapter."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_grpo.config.errors import UserError, refuse

_FILE = "adapter_config.json"
_PLAIN = {"use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters"}
"""What is empty in the configuration of an adapter that is two matrices for each layer."""


def is_adapter(name: str) -> bool:
    return (Path(name) / _FILE).is_file() and not (Path(name) / "config.json").is_file()


def base_of(name: str, setting: str = "policy.model") -> str:
    """Return the model that an adapter was trained on; for any other name, the name itself."""
    return str(read_adapter(name, setting)["base_model_name_or_path"]) if is_adapter(name) else name


def read_adapter(folder: str, setting: str = "policy.model") -> dict[str, Any]:
    """Read the configuration of an adapter. Raises UserError, which begins with `setting`, if it is not causal LoRA."""
    start = f"{setting} {folder} is an adapter"
    try:
        config = dict(json.loads((Path(folder) / _FILE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{start}, and its {_FILE} cannot be read: {error}: copy it again") from None
    config = {"base_model_name_or_path": None, "task_type": None, "peft_type": None, **config}
    base, kind, peft = (config[name] for name in ("base_model_name_or_path", "task_type", "peft_type"))
    refuse(not base, f"{start}, and names no base model: write it into {_FILE}, as base_model_name_or_path")
    more = [*filter(config.get, sorted(_PLAIN))] if peft == "LORA" else [f"peft_type {peft}"]
    more += [] if kind in ("CAUSAL_LM", None) else [f"task_type {kind}"]
    way = "merge it with peft (merge_and_unload), and give the merged model"
    refuse(bool(more), f"{start} with {', '.join(more)}, and only LoRA of a causal language model is read: {way}")
    return config


def continued(model: str, lora: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `lora` of a run that starts from an adapter, which it trains further unless the rank is set to
    0. Raises UserError for other values than the adapter's."""
    if lora.get("rank") == 0:
        return dict(lora)
    config = read_adapter(model)
    own = {"rank": config["r"], "alpha": config["lora_alpha"], "target_modules": config["target_modules"]}
    for name in own.keys() & lora.keys():
        refuse(
            lora[name] != own[name],
            f"lora.{name} {lora[name]}: training continues with policy.model {model}, an adapter with {own[name]}:"
            " leave it out, or set lora.rank to 0 to merge the adapter and train all weights",
        )
    return {**lora, **own}
