"""What a call of `generate` counts."""

from dataclasses import dataclass

from hybrid_grpo.generation.timeline import Timeline


@dataclass
class Stats:
    """Statistics of a call of `generate`."""

    steps: int = 0
    """Forward passes of the decode loop."""
    rows: int = 0
    """Total rows of these passes: one for each sampled token, and for each token of a draft that did not hold."""
    context: int = 0
    """Cache entries that these rows attended to."""
    prefills: int = 0
    """Number of prompts read; a preempted sequence that is read again is counted again."""
    answers: int = 0
    """Number of answers between turns that were added to an existing cache."""
    preempted: int = 0
    """Number of sequences that lost their pages while they were being decoded or waiting."""
    drafted: int = 0
    """Number of rows for tokens of drafts; see `Drafter`."""
    held: int = 0
    """Number of these tokens that were then sampled."""
    peak_cache_bytes: int = 0
    captures: int = 0
    """Number of forwards captured as CUDA graphs."""
    timeline: Timeline | None = None
    """None with the fallback, and if nothing was decoded."""
