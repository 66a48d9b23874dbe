"""Corpora and JSON Lines: the files that are read, record by record, with errors that name the line.
Comes in: policy, rewards.
"""
