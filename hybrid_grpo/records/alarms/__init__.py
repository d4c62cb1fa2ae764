"""Symptoms of what goes wrong in a run, and alarms that act on them."""
