"""Symptoms that something is wrong with a run, and the alarms that act on them."""
