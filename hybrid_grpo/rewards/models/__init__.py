"""Reward models: sequence classifiers that score completions. The engine, not this package, shards them."""
