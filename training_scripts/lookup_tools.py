"""The tool of the look-up task."""

import hashlib


def look_up(key: str) -> str:
    """
    Look a key up in the hidden table.

    Args:
        key: four small letters.
    """
    return "abcdefghij"[hashlib.md5(key.encode()).digest()[0] % 10]
