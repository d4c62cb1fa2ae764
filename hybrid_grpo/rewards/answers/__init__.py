"""Final answers of mathematical problems: what they are, and which are the same."""
