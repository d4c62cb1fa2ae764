"""From rows to prompts, from rollouts to micro-batches.

`batch` has the records that the stages hand to each other, and the legend of shapes. The others read sources
of rows, ready-made tasks and prompts, draw prompts from one source or a mixture, and pack rows into micro-batches. What
completions are worth is decided in `rewards/`.
"""
