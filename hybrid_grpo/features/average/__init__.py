"""The exponential moving average of the weights, exported in addition to the model."""
