"""Training stages beside GRPO, each a file: what one step does, and what is measured on held-out data.

GRPO itself is `trainer.py`. The command of a stage, which reads its inputs and starts it, is a file beside this folder;
its run's folder, checkpoints and outputs are those of every run (`run/`).
"""
