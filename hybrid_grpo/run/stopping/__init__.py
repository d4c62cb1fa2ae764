"""Ends a run when it is asked to stop, and when it cannot continue."""
