"""Checkpoints, exported models, and the space that they take."""
