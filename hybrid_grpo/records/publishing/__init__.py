"""A model's repository: its card, its curves."""
