"""Rewards, accuracy and lengths by the language of the prompt."""
