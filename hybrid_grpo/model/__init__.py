"""Everything about a Hugging Face causal language model: loading it, running it, and reading and writing its weights.

This includes checks of the architecture, packed attention, log-probabilities that are computed without holding all
logits, LoRA, the view for generation, and the kernels, which only this folder, generation and tests import. Sampling,
losses and DeepSpeed live elsewhere.
"""
