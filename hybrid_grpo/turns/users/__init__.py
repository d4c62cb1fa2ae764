"""Users that answer turns: `users` defines a function and a frozen model as users, `functions` runs the function."""
