"""Users that answer turns: `users` has a function and a frozen model, `functions` runs in worker processes."""
