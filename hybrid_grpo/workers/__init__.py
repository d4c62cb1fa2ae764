"""Runs other people's code in isolated processes, with time limits; processes that die are replaced.

What a process runs is an `Entry` (calls.py), of whatever kind. Other packages start processes through `pool`.
"""
