"""Keeps the success rates of prompts over the run, and can choose the prompts of a step by these rates."""
