"""GRPO post-training of Hugging Face causal language models inside one DeepSpeed engine."""

__version__ = "0.1.0"
