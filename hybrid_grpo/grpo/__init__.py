"""The mathematics of GRPO and nothing else: tensors in, tensors and numbers out.

Here live the losses, advantages within groups, rewards of steps, the weight of the KL, dynamic
sampling, and the optimizer steps on a rollout. Models, engines and reward functions are not known here. Nothing is
imported by this file: workers of reward functions import `length`, and have no torch.
"""
