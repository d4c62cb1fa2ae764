"""Guests: completions of other writers, from files or from frozen models, that join the groups of a rollout."""
