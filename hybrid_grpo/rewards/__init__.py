"""Reward functions: what they are, how they are found and called, and how their rewards add up.

`scoring.Rewards` is what a run uses. `functions` has the calling convention, `loading` goes from the configuration to
functions, `builtin` lists the built-in ones: `rules`, `text`, `countdown`, `maths/`, `code/`, `models/`, `remote/`.
`workers/` has the processes that call functions. Advantages are in `grpo/`.
"""
