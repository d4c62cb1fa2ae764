"""Tools that a model calls: `tools` answers turns with their results, `functions` is what worker processes hold, and
`builtins` and `search` are the tools that need no path.
"""
