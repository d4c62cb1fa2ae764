"""Keeps an exponential moving average of the weights, which is exported in addition to the model."""
