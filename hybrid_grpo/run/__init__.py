"""Everything about a run except what happens in its steps: its inputs, folder, checkpoints and held-out sets, how it
resumes and stops, and the estimate of its memory.

`trainer.py` and `commands/stages/` define the steps; `policy.py` has the weights.
"""
