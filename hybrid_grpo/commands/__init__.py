"""The commands of the command line, one per file: each parses its settings, builds what it needs, and runs.

`api` offers the same commands as Python functions. Commands only assemble what the other packages implement. Slow
imports come after the settings have been checked, so that a mistake is reported at once.
"""
