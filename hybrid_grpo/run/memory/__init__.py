"""Estimates the memory that a run needs, before it starts."""
