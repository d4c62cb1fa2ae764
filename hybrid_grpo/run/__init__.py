"""A run's life around its steps: what it reads, its folder and checkpoints, metrics and alarms, where they are written,
and the plan of its memory. And what is made for one run only and is kept with it: the critic.

What a step does is not here (`trainer.py`, `stages/`), nor are the weights (`policy.py`).
"""
