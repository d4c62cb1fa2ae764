"""Settings of the page that shows runs in the browser."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Le
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.fields import SECTION, Whole


@dataclass(frozen=True, config=SECTION)
class WatchOptionsConfig:
    """Where the page is."""

    port: Annotated[Whole, Le(65535)] = 8170
    """Port to listen at, on this machine's own address only; 0 takes a free one."""
