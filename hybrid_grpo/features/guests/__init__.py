"""Guests: completions by other writers (files or frozen models) that join the groups of a rollout."""
