"""A tool whose answers come in any order."""

import asyncio
import random


async def look_up(key: str) -> str:
    """
    Look a key up.

    Args:
        key: the key.
    """
    await asyncio.sleep(random.random() * 0.03)
    return key[::-1][:3] or "none"
