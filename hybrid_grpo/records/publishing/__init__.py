"""The repository of a trained model: its files, its card, its curves."""
