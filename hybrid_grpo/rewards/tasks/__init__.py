"""Rewards that belong to one task: problems of reasoning-gym, and function calls of BFCL."""
