"""A tool and an environment whose answers come in any order."""

import asyncio
import random

_CLOCK = random.SystemRandom()


async def look_up(key: str) -> str:
    """
    Look a key up.

    Args:
        key: the key.
    """
    await asyncio.sleep(_CLOCK.random() * 0.03)
    return key[::-1][:3] or "none"


class Repeats:
    """Gives back the end of a turn; over with the second one."""

    async def reset(self, **columns):
        self.steps = 0
        await asyncio.sleep(_CLOCK.random() * 0.03)
        return random.choice("abcdefgh")

    async def step(self, text):
        await asyncio.sleep(_CLOCK.random() * 0.03)
        self.steps += 1
        return text[::-1][:3], len(set(text)) / 4, self.steps == 2
