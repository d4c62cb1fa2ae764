"""Publishes a trained model: its files, its card, and its curves."""
