"""Trackers show a run outside its folder: wandb, TensorBoard, trackio and MLflow, a file for each.

A tracker runs in a process of its own beside rank 0 (`process.py`), which follows the files of the run's folder
(`follower.py`, `steps.py`). Training hands nothing over and waits for nothing, so a tracker may fail or hang in any
way. Nothing here needs torch.
"""
