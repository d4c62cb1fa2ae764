"""A Hugging Face causal language model as this package uses it.

Here live loading, which architectures can be packed and decoded, packed attention, log-probabilities without whole
logits, LoRA, the view that generation decodes with, the files of weights that are spread over ranks, and the C kernels.
Sampling, losses and DeepSpeed live elsewhere. Other rooms may import every module; of kernels/, generation and the
tests alone import anything.
"""
