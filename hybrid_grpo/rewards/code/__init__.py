"""The built-in `code_tests`: runs a model's programs against tests, in a sandbox of kernel protections.

Users' own reward functions run in `distributed/workers/` instead.
"""
