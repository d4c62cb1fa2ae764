"""Plans of memory for Qwen2-0.5B, on a GPU and on a CPU that do not exist."""

import torch

from hybrid_grpo.config import EngineConfig, PolicyConfig, TrainConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.data.batch import MicroBatch
from hybrid_grpo.data.packing import pack
from hybrid_grpo.distributed.hardware import Hardware
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.run.memory.dry_run import Footprint, Sizes
from hybrid_grpo.run.memory.plan import Plan

N = 494_032_768
"""Parameters of Qwen2-0.5B: 151,936 x 896 of the tied embedding and 24 layers of 14,912,384, and the last norm."""
SIZES = Sizes(
    parameters=N, trained=N, largest=151_936 * 896, active=N, vocabulary=151_936, token_bytes=24 * 2 * 128 * 2,
    training=Footprint(kept=800, head=300, layers=200), reading=0, tokens=16_384,
    linear=24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864), eight_bits=3 * 10**8,
    largest_linear=896 * 4864, tables=151_936 * 896, padded=929_119_232,
)  # fmt: skip
GPU = Hardware("gpu", True, 80 << 30, 256 << 30, 1 << 30, 1e14, 1e12)
CPU = Hardware("cpu", False, 64 << 30, 64 << 30, 1 << 30, 1e11, 1e10)


def parts(config: TrainConfig, ranks: int, hardware: Hardware = GPU, sizes: Sizes = SIZES) -> dict[str, dict[str, int]]:
    """Bytes by phase and part, prompts of 512 tokens."""
    made = Plan(config, sizes, batch_plan(config, ranks), 512, hardware)
    return {phase.name: {part.name: part.bytes for part in phase.parts} for phase in made.phases}


def recipe(stage: int = 3, dtype: str = "bfloat16", **sections) -> TrainConfig:
    return TrainConfig(policy=PolicyConfig(dtype=dtype), engine=EngineConfig(zero_stage=stage), **sections)


def micro_batch(rows: int, tokens: int) -> MicroBatch:
    """Rows of so many tokens, half of them the prompt's."""
    prompts = [[row] * (tokens // 2) for row in range(rows)]
    completions = [[0] * (tokens // 2 + 1)] * rows
    return pack(TokenRow.of(prompts, completions), 10**6, torch.device("cpu"), share="off")[0]
