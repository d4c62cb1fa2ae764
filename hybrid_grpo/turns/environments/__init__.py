"""Environments: `environments` answers turns with observations, and `instances` runs the environments in worker
processes; `openenv` and `verifiers` adapt the environments of these packages.
"""
