"""Training stages beside GRPO, each a file: what one step does, and what is measured on held-out data.

GRPO itself is `trainer.py`. A stage's command, which reads its inputs and starts it, is a file beside this folder; its folder,
checkpoints and outputs are those of every run (`run/`).
"""
