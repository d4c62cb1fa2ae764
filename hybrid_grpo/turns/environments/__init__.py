"""Environments: `environments` answers turns with observations, and `instances` runs the environments in worker
processes; `openenv` adapts the environments of that package.
"""
