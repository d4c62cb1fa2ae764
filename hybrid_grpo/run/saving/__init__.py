"""Saves checkpoints and the best model, and checks the disk space for them."""
