"""The tool of the look-up task, but its answer takes TOOL_S seconds, like that of a service."""

import asyncio
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "training_scripts"))

import lookup_tools


async def look_up(key: str) -> str:
    """
    Look a key up in the hidden table.

    Args:
        key: four small letters.
    """
    await asyncio.sleep(float(os.environ["TOOL_S"]))
    return lookup_tools.look_up(key)
