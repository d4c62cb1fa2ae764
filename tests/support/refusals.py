"""What the error says of settings that are refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_grpo.config import TrainConfig, build
from hybrid_grpo.config.errors import UserError

TWO = ["exact_match", "format_regex"]
"""Rewards."""


def refused(kind: str) -> list[Any]:
    """The cases of a kind in tests/config/refused.yaml."""
    path = Path(__file__).parents[1] / "config/refused.yaml"
    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))[kind]


def refusal(**settings: Any) -> str:
    """The one line that refuses a run of these sections."""
    with pytest.raises(UserError) as caught:
        build(TrainConfig, settings)
    message = str(caught.value)
    assert "\n" not in message and "{" not in message
    return message
