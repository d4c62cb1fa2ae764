"""How a run ends when it is asked to, and when it cannot go on."""
