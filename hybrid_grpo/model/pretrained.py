"""What a model folder or the hub says of a model without its weights: its tokenizer and its configuration."""

from __future__ import annotations

import json
from typing import Any

from transformers import AutoConfig, AutoTokenizer
from transformers import logging as transformers_logging

from hybrid_grpo.config.errors import UserError

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


def load_tokenizer(name: str, setting: str = "policy.model") -> Any:
    """The tokenizer of a model folder or hub name; `setting` begins the messages.

    Raises:
        UserError: there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise UserError(f"{setting} {name}: its tokenizer does not load: {first_line(error)}") from error
    # Where a folder has no tokenizer files, transformers makes one that knows its special tokens only.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"{setting} {name} has no tokenizer: save the one of the model in the same folder")
    return tokenizer


def load_config(name: str, setting: str = "policy.model") -> Any:
    """The model's configuration, as it is; `setting` begins the messages.

    Raises:
        UserError: there is none, or it is not one that transformers knows.
    """
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise UserError(f"{setting} {name} does not load: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What it says, in one line; its type where it says nothing."""
    text = repr(error) if isinstance(error, KeyError) else str(error).strip()
    return (text.splitlines() or [type(error).__name__])[0]
