"""A reward function that fails in every way there is; prompt and completion decide how, so that it can be predicted."""

from __future__ import annotations

import os
import time
from zlib import crc32

FATES = (("raises", 0.05), ("hangs", 0.02), ("none", 0.05), ("nan", 0.02), ("allocates", 0.01), ("exits", 0.01))
FAILURES = {"raises", "hangs", "nan", "allocates", "exits"}


def fate(prompt: str, completion: str) -> str:
    """What happens to this completion: one of `FATES`, with their probabilities, or `scored`."""
    number = crc32(f"{prompt}|{completion}".encode()) / 2**32
    for name, share in FATES:
        if number < share:
            return name
        number -= share
    return "scored"


def reward(completion: str) -> float:
    """What a completion is worth that is scored."""
    return len(set(completion)) / 8


def hostile(prompts, completions):
    values = []
    for prompt, completion in zip(prompts, completions, strict=True):
        what = fate(prompt, completion)
        if what == "raises":
            raise RuntimeError("no reward for this one")
        if what == "hangs":
            while True:
                time.sleep(1)
        if what == "allocates":
            return [float(len(bytearray(8 << 30)))]
        if what == "exits":
            os._exit(3)
        values.append({"none": None, "nan": float("nan")}.get(what, reward(completion)))
    return values
