"""A Hugging Face causal language model as this package uses it.

Loading, the architectures that can be packed and decoded, packed attention, log-probabilities without whole logits,
LoRA, the view for generation, files of sharded weights, and kernels, which only generation and tests import from
outside. Sampling, losses and DeepSpeed live elsewhere.
"""
