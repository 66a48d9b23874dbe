"""`thresher bench decode`: whole decode steps of models of real sizes, beside their floor and what was predicted.

run.py        the measurement and the command
"""
