"""The mathematics of GRPO and nothing else: losses, advantages, the weight of the KL, dynamic sampling, minibatches.

Tensors in, tensors and numbers out; callers pass the function that sums over ranks. This file imports nothing, because
the workers of reward functions import `length` and have no torch.
"""
