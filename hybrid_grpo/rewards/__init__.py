"""Reward functions: how they are loaded and called, and how their rewards are added up.

A run uses `scorer.Rewards`, with the functions that `loader` loads. `functions` defines the calling convention and
lists the built-in functions, which are in `rules`, `text`, `maths/`, `code/`, `tasks/`, `models/` and
`remote/`. The package `distributed/workers/` calls the functions, and `grpo/` turns rewards into advantages.
"""
