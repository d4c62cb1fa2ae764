"""The commands of the command line, each a file: it parses its settings, builds what it needs, and runs.

`api` has the same commands as Python functions. What a command does is in the rooms below; here it is assembled.
Slow imports follow the check of the settings, so that a mistake is reported at once.
"""
