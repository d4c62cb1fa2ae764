"""Rewards over HTTP: the client is the built-in `remote`, the server is the command `serve-reward`."""
