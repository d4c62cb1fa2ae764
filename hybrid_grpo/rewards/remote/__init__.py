"""Rewards over HTTP: `remote`, a service of the user, and `judge`, a language model that grades."""
