"""Isolated processes for other people's code, with time limits; they are replaced when they die.

What runs in them is an `Entry` (calls.py); this room knows no kind of entry. `pool` is what others use.
"""
