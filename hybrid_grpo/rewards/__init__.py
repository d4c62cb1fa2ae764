"""Reward functions: what they are, how they are found and called, and how their rewards add up.

A run uses `scorer.Rewards`, which `loader` makes of the configuration. `functions` has the calling convention and the
list of built-in functions, which are in `rules`, `text`, `countdown`, `maths/`, `code/`, `models/` and `remote/`.
Functions are called by `workers/`. Advantages are in `grpo/`.
"""
