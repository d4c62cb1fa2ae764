"""The exponential moving average of the weights, exported beside the model."""
