"""What a run needs of memory, before it starts."""
