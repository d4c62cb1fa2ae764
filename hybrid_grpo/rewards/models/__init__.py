"""Reward models: sequence classifiers that score completions. Sharding one over the ranks is the engine's part."""
