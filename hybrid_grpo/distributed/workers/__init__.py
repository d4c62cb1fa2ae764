"""Runs other people's code in isolated processes, with time limits; processes that die are replaced.

The processes can run the code of any `Entry` (calls.py). Other packages start them through `pool`.
"""
