"""The processes of a run: ranks, their devices and files, what ZeRO shards over them, and workers for other people's
code. Knows no model."""
