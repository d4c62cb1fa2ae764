"""From rows to prompts, from rollouts to micro-batches.

`batch` has the records that the stages hand to each other, and the legend of shapes. The other modules read rows, turn
them into prompts, draw prompts from one source or a mixture, and pack rollouts into micro-batches. Rewards are computed
in `rewards/`.
"""
