"""The built-in `code_tests`: tests programs that a model wrote in a sandbox of kernel protections.

Reward functions of users do not run here but in `workers/`.
"""
