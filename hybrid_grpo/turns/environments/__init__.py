"""Environments: `environments` answers turns with observations; `in_worker` runs them in worker processes."""
