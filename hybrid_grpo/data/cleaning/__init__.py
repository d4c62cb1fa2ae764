"""Rows that training would learn the wrong thing from, or stop at: found, counted, shown and left out.

`faults` looks at a row by itself, `duplicates` and `overlap` compare rows, and `cleaner` does one after the other.
`text` says what of a prompt is compared. Nothing here changes a row.
"""
