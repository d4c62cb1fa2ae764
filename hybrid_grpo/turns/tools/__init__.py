"""Tools that a model calls: `tools` answers turns with their results, and `functions` runs in worker processes."""
