"""Decoding on a plain module: no engine, no collective, every rank at its own pace.

`generate()` in loop.py is the entry. This package knows torch and transformers and nothing above it.
"""

from hybrid_grpo.generation.loop import OnFinish, Request, Stats, generate
from hybrid_grpo.generation.sampler import GREEDY, Sampling, stream_key

__all__ = ["GREEDY", "OnFinish", "Request", "Sampling", "Stats", "generate", "stream_key"]
