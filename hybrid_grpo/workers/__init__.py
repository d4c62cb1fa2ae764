"""Isolated processes for other people's code, with time limits; they are replaced when they die.

What runs in them is an `Entry` (calls.py); this package knows nothing about kinds of entries. Callers use `pool`.
"""
