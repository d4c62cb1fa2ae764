"""From rows to prompts, from rollouts to micro-batches.

`batch` has the records that the stages hand to each other, and the legend of shapes. Beside it live sources of rows,
ready-made tasks, the loader with its mixture, cleaning, and packing. What completions are worth
is decided in `rewards/`.
"""
