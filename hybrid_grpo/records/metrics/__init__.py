"""The metrics of a step: their catalogue, how they are measured and reduced, and their charts."""
