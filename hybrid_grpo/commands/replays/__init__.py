"""What `replay-step` repeats and compares: a training step, and the rollouts that a run saved."""
