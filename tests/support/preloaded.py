"""What programs in forks would import, and what else each of them would do again; see forks.py."""

from contextlib import suppress

import datasets  # noqa: F401
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  It imports the compiler of torch.
import peft  # noqa: F401
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import hybrid_grpo.stages.reward
import hybrid_grpo.stages.sft
import hybrid_grpo.trainer  # noqa: F401

with suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    # A thousand regular expressions, compiled when the first model is loaded and kept.
    get_checkpoint_conversion_mapping("qwen2")
