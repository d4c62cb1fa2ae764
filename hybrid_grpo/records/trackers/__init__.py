"""Trackers, which show a run outside its folder: wandb, TensorBoard, trackio and MLflow, each in a file of its own.

Each tracker runs in a process of its own next to rank 0 (`process.py`), which follows the files in the run's folder
(`follower.py`, `steps.py`). Training does not wait for it, so a tracker that fails or hangs does no harm. Nothing here
needs torch.
"""
