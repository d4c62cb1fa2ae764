"""What looks wrong in a run, and what is done about it."""
