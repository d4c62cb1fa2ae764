"""Decodes with a plain module, without engine and collectives, so that every rank goes at its own pace.

It contains the decode loop with its scheduler, paged cache, sampler and CUDA graphs, and the fallback through
transformers' `generate()`. Other packages import the names below, rollout.py (which applies the settings of `rollout`),
and the modules whose memory use they estimate.
"""

from hybrid_grpo.generation.journal import Journal, complete_rest
from hybrid_grpo.generation.loop import Stats, generate
from hybrid_grpo.generation.sampler import GREEDY, Sampling, stream_key
from hybrid_grpo.generation.sequence import Callbacks, OnFinish, OnStep, Request, ShouldStop, Turns
from hybrid_grpo.generation.workspace import Workspace

__all__ = [
    "GREEDY", "Callbacks", "Journal", "OnFinish", "OnStep", "Request", "Sampling", "ShouldStop", "Stats", "Turns",
    "Workspace", "complete_rest", "generate", "stream_key",
]  # fmt: skip
