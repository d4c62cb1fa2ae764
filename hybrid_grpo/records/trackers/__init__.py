"""Trackers, which show a run outside its folder: wandb, TensorBoard, trackio and MLflow, a file for each.

A tracker runs in a process of its own beside rank 0 (`process.py`), which follows the files of the run's folder
(`follower.py`, `steps.py`). Training does not wait for it, so a tracker may fail or hang in any way. Nothing here needs
torch.
"""
