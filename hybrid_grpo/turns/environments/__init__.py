"""Environments of completions: `environments` answers turns with their observations, and `instances` is what worker
processes hold; `openenv` and `verifiers` adapt the environments of these packages.
"""
