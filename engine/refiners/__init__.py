"""Compressors that keep a part of the passages and write nothing: rows of evidence that an extractor is compared with.

One a file, listed by kinds.py; and the supervised data of one that writes, FilCo. Another may come in, as a class with
`refine` and `count_tokens`; who answers from what is kept, and the file of it, are extraction's business.
"""
