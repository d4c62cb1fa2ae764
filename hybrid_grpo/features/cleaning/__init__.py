"""Finds training rows that are faulty, duplicated or held out, and writes the remaining rows.

`faults` checks single rows, `duplicates` and `overlap` compare rows, `cleaner` runs all checks, and `command` is the
command `data`. Rows are never changed.
"""
