"""The commands of the command line, one per file: each parses its settings, builds what it needs, and runs.

`api` has the same commands as Python functions. Commands only assemble what the other packages implement. Slow imports
come after the check of the settings, so that a mistake is reported at once.
"""
