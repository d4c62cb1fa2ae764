"""Tools that a model calls: `tools` answers turns with their results, `functions` runs in worker processes, and
`builtins` and `search` are the tools that need no path.
"""
