"""`make gpu-check`: everything that a GPU has to confirm, in eight minutes, each part cut off on its own.

parts.py    what is run, for how long, and which figures of its rows the table shows
run.py      the parts one after the other, and the table
"""
