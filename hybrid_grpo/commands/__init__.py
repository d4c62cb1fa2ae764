"""The commands of the command line: each parses, builds and runs."""
