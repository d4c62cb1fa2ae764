"""Training stages other than GRPO, one per file, each with its optimizer step and its evaluation on held-out data.

GRPO itself is in `trainer.py`. The command that reads a stage's inputs and starts the stage is in the folder above. All
stages share the run folder, checkpoints and outputs of `run/`.
"""
