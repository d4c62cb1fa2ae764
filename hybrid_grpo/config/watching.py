"""Settings of `watch`, the page that shows runs in a browser."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Le
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.fields import SECTION, Whole


@dataclass(frozen=True, config=SECTION)
class WatchOptionsConfig:
    """Where the page is served."""

    port: Annotated[Whole, Le(65535)] = 8170
    """Port to listen on, reachable from this machine only; 0 selects a free one."""
