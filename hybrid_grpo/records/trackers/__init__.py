"""Shows a run on wandb.

wandb runs in a process of its own next to rank 0 (`process.py`), which follows the files in the run's folder
(`follower.py`, `steps.py`). Training does not wait for it, so it does no harm if it fails or hangs. Nothing here needs
torch.
"""
