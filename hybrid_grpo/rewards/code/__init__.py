"""The built-in `code_tests`: programs that a model wrote, tested in a sandbox of the Linux kernel's protections.

The user's own reward functions do not run here but in `workers/`.
"""
