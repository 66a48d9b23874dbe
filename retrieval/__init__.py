"""Corpora, questions, encoders and indexes: from a query to the passages that may answer it.

Start with `corpus` and `questions` for the files, `index` for searching, `commands` for what the command line
does.
"""
