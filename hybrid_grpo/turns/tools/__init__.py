"""Tools that a model calls: `tools` answers turns with their results, `functions` runs in worker processes, and
`builtins` has the tools that need no path.
"""
