"""What programs in forks would import, and what else each of them would do again; see forks.py."""

from contextlib import suppress

import datasets  # noqa: F401
import peft  # noqa: F401
import torch
from transformers import Qwen2Config

import hybrid_grpo.commands.sft
import hybrid_grpo.commands.sft_trainer
import hybrid_grpo.commands.train
import hybrid_grpo.run.inputs
import hybrid_grpo.run.training
import hybrid_grpo.trainer  # noqa: F401
from hybrid_grpo.config import BatchPlan, TrainConfig, build
from hybrid_grpo.run.memory.dry_run import measure

with suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    # A thousand regular expressions, compiled when the first model is loaded and kept.
    get_checkpoint_conversion_mapping("qwen2")

# A run begins with a plan of its memory. torch remembers what comes of an operation on given shapes: here those of the
# workshop's recipe on one rank and on two.
_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 29}
_MODEL = Qwen2Config(**_SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
_CONFIG = build(TrainConfig, {"policy": {"dtype": "float32"}, "rollout": {"max_completion_tokens": 8}})
# After a backward pass of fake tensors, a torch for GPUs refuses forks theirs: it has started threads.
for prompts in () if torch.version.cuda else (4, 2):
    measure(_CONFIG, _MODEL, BatchPlan(4 // prompts, prompts, 4, 1, 1), 6, on_gpu=False)
