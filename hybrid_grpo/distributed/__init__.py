"""The processes of a run: ranks, their devices and files, ZeRO's shards, workers for foreign code. Knows no model."""
