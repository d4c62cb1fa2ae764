"""Sequence classifiers of transformers, from a folder or the hub; a model that is no reward model is refused.

Messages begin with `model`, the name of the setting. torch and transformers are imported where they are first needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_CLASSIFIER = "ForSequenceClassification"


def find_config(name: str) -> Any:
    """The configuration of a model folder or hub name.

    Raises:
        ValueError: there is no such model, or it is no sequence classifier of one or two labels.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    from hybrid_grpo.model.loading import load_config

    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise ValueError(f"model {name}: there is no such folder")
    config = load_config(name, "model")
    classes = config.architectures or []
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or config.is_encoder_decoder:
        raise ValueError(f"model {name} is a {config.model_type}: take a ...{_CLASSIFIER} that is no encoder-decoder")
    if classes and not any(_CLASSIFIER in each for each in classes):
        raise ValueError(f"model {name} is a {classes[0]}: take one that was trained as a ...{_CLASSIFIER}")
    if config.num_labels > 2:
        raise ValueError(f"model {name} has {config.num_labels} labels: a reward model has 1, or 2, bad and good")
    return config


def load_classifier(name: str, config: Any, dtype: str) -> Any:
    """The model, its weights in the type that torch calls `dtype`.

    Raises:
        ValueError: the weights do not load, or some are missing.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForSequenceClassification

    from hybrid_grpo.model.loading import first_line

    try:
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            name,
            config=config,
            dtype=getattr(torch, dtype),
            # Wrong shapes are reported below, by name.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ValueError(f"model {name} does not load: {first_line(error)}") from error
    # transformers initializes such weights at random and only warns.
    for what, names in (("lacks", loaded["missing_keys"]), ("has the wrong shape for", loaded["mismatched_keys"])):
        if names:
            first = min(key if isinstance(key, str) else key[0] for key in names)
            raise ValueError(
                f"model {name} {what} {len(names)} of the weights of a {type(model).__name__}, {first} among them:"
                " take a complete reward model"
            )
    return model


def weight_bytes(config: Any, dtype: str) -> int:
    """Bytes of the weights of a model, computed from its configuration."""
    import torch
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    return sum(p.numel() for p in model.parameters()) * int(getattr(torch, dtype).itemsize)
