"""Rewards over HTTP: the client behind the built-in `remote`, and the service behind the command `serve-reward`.

What the functions are and how their rewards add up is in the room above.
"""
