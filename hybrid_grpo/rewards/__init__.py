"""Reward functions: what they are, how they are found and called, and how their rewards add up.

`scoring.Rewards` is what a run uses. `functions` has the calling convention and the list of the built-in functions,
which are in `rules`, `text`, `countdown`, `maths/`, `code/`, `models/` and `remote/`. `loading` goes from the
configuration to functions, and `workers/` has the processes that call them. Advantages are in `grpo/`.
"""
