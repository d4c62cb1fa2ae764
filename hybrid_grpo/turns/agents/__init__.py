"""Agents: programs with loops of their own, which ask the policy for turns over HTTP while it samples.

`endpoint` serves them, `protocol` reads what they ask and writes what they get, `sessions` gives every turn its
sequence in the decoder (`histories`), and `in_worker` runs the agents themselves, in worker processes.
"""
