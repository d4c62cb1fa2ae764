"""The mathematics of GRPO and nothing else: losses, advantages, the KL coefficient, dynamic sampling, minibatches.

Functions take and return tensors and numbers; callers pass the function that sums over ranks.
"""
