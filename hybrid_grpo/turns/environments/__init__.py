"""Environments: `environments` answers turns with observations; `instances` runs them in worker processes."""
