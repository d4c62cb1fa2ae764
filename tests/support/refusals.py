"""What the error says of settings for training that contradict each other."""

from typing import Any

import pytest

from hybrid_grpo.config import TrainConfig, build
from hybrid_grpo.config.errors import UserError

TWO = ["exact_match", "format_regex"]
"""Rewards."""


def refusal(**settings: Any) -> str:
    """The one line that refuses a run of these sections."""
    with pytest.raises(UserError) as caught:
        build(TrainConfig, settings)
    message = str(caught.value)
    assert "\n" not in message and "{" not in message
    return message
