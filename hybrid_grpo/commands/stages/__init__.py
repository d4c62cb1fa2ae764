"""Training stages other than GRPO, one per file: what one step does, and what is measured on held-out data.

GRPO itself is `trainer.py`. The command that reads a stage's inputs and starts it is a file in the folder above. All
stages share the run folder, checkpoints and outputs of `run/`.
"""
