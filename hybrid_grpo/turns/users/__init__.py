"""Users that answer turns: `users` has a function and a frozen model, `functions` is what worker processes hold."""
