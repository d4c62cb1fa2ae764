"""Loads what a checkpoint sees with: its processor, which says how pictures enter a prompt, and its tower."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.model.gguf import files_of
from hybrid_grpo.model.loading import first_line, load_config, load_weights, without_dropout
from hybrid_grpo.model.towers import outside_deepspeed, tower_class


def load_processor(name: str, setting: str = "policy.model") -> Any:
    """Load transformers' processor of a model folder or hub name. Raises UserError if there is none, or what it needs
    is not installed."""
    refuse(
        importlib.util.find_spec("PIL") is None,
        f"{setting} {name}: prompts have pictures, and pillow is not installed: pip install 'hybrid-grpo[pictures]'",
    )
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    try:
        name = files_of(name, setting)
        kind = PROCESSOR_MAPPING[type(load_config(name, setting))]
        # transformers needs torchvision for videos, and for pictures only if it is there.
        kind = kind if importlib.util.find_spec("torchvision") else without_videos(kind)
        processor = kind.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers raises anything for files that it did not write
        raise UserError(f"{setting} {name}: its processor for pictures does not load: {first_line(error)}") from error
    refuse(
        getattr(processor, "image_token", None) is None,
        f"{setting} {name}: its processor ({type(processor).__name__}) names no token for pictures: take another model",
    )
    return processor


def without_videos(kind: Any) -> Any:
    """Return a class of processors that has parts for text and pictures only."""
    from transformers import AutoImageProcessor, AutoTokenizer

    parts = {"tokenizer": AutoTokenizer, "image_processor": AutoImageProcessor}

    def arguments(cls: Any, name: str, processor_dict: Any = None, **options: Any) -> list[Any]:
        return [
            parts[part].from_pretrained(name, **options) if part in parts else None for part in cls.get_attributes()
        ]

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if argument is None else kind.check_argument_for_proper_class(self, name, argument)

    members = {"_get_arguments_from_pretrained": classmethod(arguments), "check_argument_for_proper_class": check}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})


def load_tower(policy: PolicyConfig, setting: str = "policy.model") -> Any:
    """Load the tower of `policy.model`, on the CPU and outside the engine. Raises UserError as `load_weights` does."""
    config = load_config(policy.model, setting)
    with outside_deepspeed():
        return load_weights(
            tower_class(config),
            policy.model,
            without_dropout(config),
            setting,
            dtype=getattr(torch, policy.dtype),
            use_safetensors=None if policy.pickled_weights else True,
        )
