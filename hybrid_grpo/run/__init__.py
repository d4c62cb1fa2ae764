"""A run's life around its steps: what it reads, its folder and checkpoints, metrics and alarms, where they are written,
and the plan of its memory.

What a step does is not here (`trainer.py`, `commands/stages/`), nor are the weights (`policy.py`).
"""
