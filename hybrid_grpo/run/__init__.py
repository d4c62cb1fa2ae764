"""Everything about a run except what happens in its steps: its inputs, folder, checkpoints and held-out sets, how it
resumes and stops, and the estimate of its memory.

`trainer.py` and `commands/sft_trainer.py` define the steps; `policy.py` has the weights.
"""
