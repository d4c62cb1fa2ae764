"""How reward functions are called: inline, in threads, in worker processes; with time limits, and replaced if they die.

What a function may be and return is in `rewards/functions.py`; programs that a model wrote run in `rewards/code/`.
"""
